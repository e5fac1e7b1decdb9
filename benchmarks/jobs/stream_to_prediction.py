"""How soon an event counts: from the broker to an answered prediction, by way of a commit.

Five thousand events a second go into a stream of Redis; a job trains on them, and `elastable serve-model --follow`
answers from its newest version. Now and then an event has ids that nobody had before, whose rows are zeros: their
prediction is exactly 0.5 until the event is trained and its rows have arrived. Broker, sender, job, server and client
share this machine.

    python -m benchmarks.jobs.stream_to_prediction
"""

import http.client
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack, suppress

import keras
import numpy as np
import redis

import elastable as et
from benchmarks.click_job.sizes import DIM, FEATURES
from benchmarks.harness import Row, publish
from benchmarks.processes import child, line_of, redis_server
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.open_store import open_reader

_KEY, _RATE, _TURN_S, _SECONDS = "events", 5_000, 0.02, 30.0
_ROWS, _NEW_EVERY = 100_000, 5  # turns
_SLOWLY = 250  # events a second, until all of it runs
_WARM_S, _START_S = 10.0, 240.0


def model() -> keras.Model:
    """The rows of 26 ids of a record, summed: a prediction changes with any of them, and with nothing else."""
    ids = keras.Input((FEATURES,), dtype="int64", name="ids")
    rows = et.Embedding(None, DIM, "zeros", name="features")(ids)
    click = keras.layers.Activation("sigmoid", name="click")(keras.ops.sum(rows, axis=(1, 2)))
    made = keras.Model({"ids": ids}, click, name="events")
    made.compile(keras.optimizers.Adagrad(0.01), "binary_crossentropy")
    return made


def data(split: str) -> et.Reader | None:
    """The events; nothing to validate with."""
    if split == "validation":
        return None
    return et.RedisStreamReader(os.environ["EVENTS"], _KEY, label="clicked")


def main() -> None:
    """Measures, prints and writes `results/stream_to_prediction.json`."""
    with ExitStack() as held:
        url = held.enter_context(redis_server()).url
        os.environ["EVENTS"] = url
        sender = held.enter_context(_Sender(url))
        options = ("--workers", "1", "--store", url, "--micro-batch-size", "512", "--linger", "0.2", "--no-export")
        held.enter_context(child("elastable", "train", __file__, *options, "--run-dir", held.enter_context(_folder())))
        _until_trained(url)
        said = line_of(held.enter_context(child("elastable", "serve-model", url, "--follow", "--http", "127.0.0.1:0")))
        sender.begin()
        time.sleep(_WARM_S)
        took = _answered(said.rstrip("/").rpartition("/")[2], sender)
    rows = [
        Row.at_most(f"event to prediction, p50 of {len(took)}", statistics.median(took), "s", 1.5),
        Row.at_most("event to prediction, p99", float(np.quantile(took, 0.99)), "s", 5.0),
        Row("events sent", sender.sent / sender.seconds, "events/s", _RATE, sender.sent / sender.seconds / _RATE),
    ]
    publish("stream_to_prediction", f"From an event to a prediction, {_RATE:,} events a second", rows)


def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="runs-")


def _until_trained(url: str) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up:
        with suppress(ElastableError), open_reader(url) as reader:  # nothing is there yet
            if reader.version() > 0:
                return
        time.sleep(0.5)
    raise SystemExit("the job has trained nothing")


class _Sender:
    """Sends events, and new ids among them, in a thread.

    Attributes:
        new: New id -> when its event was in the broker, in the order in which they were sent.
        sent, seconds: Events since `begin`, and in how long.
    """

    def __init__(self, url: str) -> None:
        self._client, self._over, self._begun = redis.Redis.from_url(url), threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._run)
        self.new: dict[int, float] = {}
        self.sent, self.seconds, self._rate = 0, 0.0, _SLOWLY

    def __enter__(self) -> "_Sender":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()

    def begin(self) -> None:
        """From now on it is `_RATE` events a second."""
        self._begun, self.sent, self._rate = time.monotonic(), 0, _RATE

    def _run(self) -> None:
        random, began = np.random.default_rng(0), time.monotonic()
        for turn in itertools.count():
            if self._over.wait(max(0.0, began + turn * _TURN_S - time.monotonic())):
                return
            ids = random.integers(0, _ROWS, (each := round(self._rate * _TURN_S), FEATURES))
            if new := turn % _NEW_EVERY == 0:
                ids[0] = _ROWS + turn
            with self._client.pipeline(transaction=False) as pipe:
                for record in ids.tolist():
                    event = json.dumps({"ids": record, "clicked": record[0] % 2})
                    pipe.xadd(_KEY, {"event": event}, maxlen=100 * _RATE, approximate=True)
                pipe.execute()
            if new:
                self.new[_ROWS + turn] = time.monotonic()
            self.sent, self.seconds = self.sent + each, time.monotonic() - self._begun


def _answered(address: str, sender: _Sender) -> list[float]:
    """Seconds from each event with new ids to the first answer that knows of it."""
    connection = http.client.HTTPConnection(address, timeout=60)
    began, known = time.monotonic(), len(sender.new)
    waiting: list[int] = []
    took: list[float] = []
    while time.monotonic() < began + _SECONDS or waiting:
        if time.monotonic() < began + _SECONDS:
            waiting += list(sender.new)[known:]
            known = len(sender.new)
        asked = np.repeat(np.array(waiting or [0])[:, np.newaxis], FEATURES, axis=1)
        connection.request("POST", "/v1/models/events:predict", json.dumps({"inputs": {"ids": asked.tolist()}}))
        reply = connection.getresponse()
        said, now = json.loads(reply.read()), time.monotonic()
        if reply.status != 200:
            raise SystemExit(str(said))
        done = {new for new, click in zip(waiting, np.ravel(said["outputs"]), strict=False) if click != 0.5}
        took += [now - sender.new[new] for new in done]
        waiting = [new for new in waiting if new not in done]
        time.sleep(0.01)
    return took


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
