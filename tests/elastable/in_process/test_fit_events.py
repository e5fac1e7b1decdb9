"""`et.fit` on a stream of events: as on the same records in arrays, until it ends; and what is refused."""

import json
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import redis
from confluent_kafka import Producer

import elastable as et
from elastable.embedding_store.errors import BadInput
from elastable.jobs.job_hooks import JobHooks
from elastable.master.commits.committer import Committer
from elastable.master.commits.row_gradients import PushesLost
from elastable.master.core import stream_planner
from tests.ports import free_port
from tests.tcp_proxy import TcpProxy, tcp_proxy
from tests.untyped import Keyword

USERS = np.random.default_rng(0).integers(0, 20, 100)
ARRAYS = ({"user": USERS}, (USERS % 2).astype("float32"))


@pytest.fixture
def url(redis_url: str) -> str:
    with redis.Redis.from_url(redis_url) as client, client.pipeline() as pipe:
        for user in USERS.tolist():
            pipe.xadd("clicks", {"event": json.dumps({"user": user, "clicked": user % 2})})
        pipe.execute()
    return redis_url


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    user = keras.Input((), dtype="int64", name="user")
    made = keras.Model({"user": user}, keras.layers.Dense(1)(et.Embedding(None, 4, name="users")(user)))
    made.compile("adam", "mse")
    return made


def fitted(x: object, **options: Keyword) -> tuple[keras.Model, list[float]]:
    made = model()
    done = et.fit(made, x, batch_size=16, verbose=0, **options)
    losses: list[float] = done.history["loss"]
    return made, losses


def weights(model: keras.Model) -> list[np.ndarray]:
    return [*model.layers[-1].get_weights(), model.get_layer("users").read_rows(np.arange(20))]


@pytest.fixture(scope="module")
def on_arrays() -> list[np.ndarray]:
    """The weights that all of the records lead to."""
    return weights(fitted(ARRAYS, shuffle=False)[0])


def assert_same(one: keras.Model, expected: list[np.ndarray]) -> None:
    for mine, other in zip(weights(one), expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def reader_of(url: str, **options: Keyword) -> et.RedisStreamReader:
    return et.RedisStreamReader(url, "clicks", label="clicked", **{"steps_per_epoch": 3, **options})


def test_the_numbers_are_those_of_the_same_records_in_arrays(url: str, on_arrays: list[np.ndarray]) -> None:
    """Seven batches: epochs of three, three and one."""
    on_stream, losses = fitted(reader_of(url), epochs=50, until="end", validation_data=ARRAYS)
    assert len(losses) == 3
    assert_same(on_stream, on_arrays)
    assert len(fitted(reader_of(url), epochs=2)[1]) == 2


def test_a_fit_that_continues_another_goes_on_behind_its_last_event(
    url: str, on_arrays: list[np.ndarray], tmp_path: Path
) -> None:
    log = f"memory?log={tmp_path / 'log'}"
    fitted(reader_of(url), epochs=1, store=log)
    second, losses = fitted(reader_of(url), epochs=9, until="end", store=log, continue_from=log)
    assert len(losses) == 2
    assert_same(second, on_arrays)


def test_events_of_kafka_have_the_same_numbers(on_arrays: list[np.ndarray]) -> None:
    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = producer.list_topics(timeout=30).brokers.values()
    for user in USERS.tolist():
        producer.produce("clicks", json.dumps({"user": user, "clicked": user % 2}), partition=2)
    assert producer.flush(30) == 0
    where, quiet = f"{broker.host}:{broker.port}", {"log_level": 0}
    reader = et.KafkaReader("clicks", where, steps_per_epoch=3, label="clicked", config=quiet)
    assert_same(fitted(reader, epochs=50, until="end")[0], on_arrays)


class Cut(keras.callbacks.Callback):
    """After the first version the server is away, until the job has noticed."""

    def __init__(self, proxy: TcpProxy, noticed: threading.Event) -> None:
        super().__init__()
        self._proxy, self._server, self._noticed = proxy, proxy.server_port, noticed

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if int(self.model.optimizer.iterations) == 1:
            self._proxy.server_port = free_port()
            self._proxy.cut()
            threading.Thread(target=self._back, daemon=True).start()

    def _back(self) -> None:
        assert self._noticed.wait(60)
        self._proxy.server_port = self._server


def test_a_server_that_is_away_is_waited_for(
    url: str, on_arrays: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed = threading.Event()
    monkeypatch.setattr(stream_planner._log, "warning", lambda *words: noticed.set())
    with tcp_proxy(int(url.rpartition(":")[2])) as proxy:
        through = reader_of(f"redis://127.0.0.1:{proxy.port}?deadline=1")
        # Few versions are planned ahead: the others are asked for while the server is away.
        monkeypatch.setattr(stream_planner, "_AHEAD", 1)
        disturbed, _ = fitted(through, epochs=50, until="end", callbacks=Cut(proxy, noticed))
    assert noticed.is_set()
    assert_same(disturbed, on_arrays)


def test_bad_events_of_pushes_that_were_lost_are_noted_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, noted, commit = [PushesLost([0])], list[int](), Committer.commit

    def commit_again(*given: Keyword) -> object:
        if lost:
            raise lost.pop()
        return commit(*given)

    monkeypatch.setattr(Committer, "commit", commit_again)
    monkeypatch.setattr(JobHooks, "on_bad_events", lambda _, version, events: noted.append(version))
    with redis.Redis.from_url(redis_url) as client:
        for payload in ("{", *[json.dumps({"user": 1, "clicked": 0})] * 31, "{"):
            client.xadd("clicks", {"event": payload})
    trained, _ = fitted(reader_of(redis_url), epochs=9, until="end")
    assert (int(trained.optimizer.iterations), noted, lost) == (3, [1, 3], [])


def test_bad_events_are_passed_over_up_to_a_bound(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        for _ in range(40):  # a whole micro-batch of them, and more
            client.xadd("clicks", {"event": "{"})
    whole, _ = fitted(reader_of(url), epochs=9, until="end")
    with pytest.raises(BadInput, match=r"28 events of the stream could not be read, and --max-bad-events is 20"):
        fitted(reader_of(url), epochs=9, until="end", max_bad_events=20)
    assert int(whole.optimizer.iterations) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_split": 0.1}, "validation_split=0.1 with RedisStreamReader"),
        ({"steps_per_epoch": 3}, "steps_per_epoch=3 with RedisStreamReader"),
        ({"initial_epoch": 1, "epochs": 2}, "initial_epoch=1 with RedisStreamReader"),
        ({"class_weight": {0: 1.0}}, "class_weight=.* with RedisStreamReader"),
        ({"until": "tomorrow"}, "--until tomorrow: write end"),
    ],
)
def test_what_has_no_meaning_for_a_stream_is_refused(url: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fitted(reader_of(url), **options)


def test_a_stream_is_for_training_alone(url: str) -> None:
    with pytest.raises(BadInput, match="an RedisStreamReader is for training alone"):
        fitted(({"user": USERS}, USERS), validation_data=reader_of(url))
    with pytest.raises(BadInput, match="part 0, counted from 0, is a RedisStreamReader"):
        et.PartsReader([reader_of(url)])
    with pytest.raises(BadInput, match="until='end': x is no stream of events"):
        fitted(({"user": USERS}, USERS), until="end")
