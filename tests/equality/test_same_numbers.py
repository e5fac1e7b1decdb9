"""A distributed job trains the same numbers as a local one, whichever process computes, stores rows or dies."""

from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.open_store import open_reader, open_store
from elastable.master.tasks.record_order import record_order
from tests.equality import model as equality
from tests.equality.jobs import Numbers, differing, train
from tests.sentinels import running_watched
from tests.servers import running_server


def test_one_process_equals_plain_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 updates of 64 records: 4 micro-batches of 16 here, one batch of 64 in `model.fit`."""
    vocabulary, optimizer = 40, "adagrad"
    monkeypatch.setenv("EQUALITY_VOCABULARY", str(vocabulary))
    monkeypatch.setenv("EQUALITY_OPTIMIZER", optimizer)
    keras.utils.set_random_seed(1)
    ours = equality.model()
    plain = equality.plain_model(vocabulary, optimizer)
    x, y = equality.records(vocabulary)
    store = MemoryStore()
    initial = {}
    for name, layer in (("words", "first"), ("alone", "alone"), ("bags", "bags")):
        ours.get_layer(layer).attach(None, seed=7)
        initial[name] = ours.get_layer(layer).read_rows(np.arange(ours.get_layer(layer).input_dim or vocabulary))
    for name, rows in initial.items():
        plain.get_layer(name).set_weights([rows])
    for name in ("hidden", "out"):
        plain.get_layer(name).set_weights(ours.get_layer(name).get_weights())
    order = record_order(equality.RECORDS, 0, 7, True, None).take(0, equality.RECORDS)
    plain.fit({key: value[order] for key, value in x.items()}, y[order], batch_size=64, shuffle=False, verbose=0)
    et.fit(ours, (x, y), batch_size=16, grads_to_wait=4, seed=7, store=store, verbose=False)
    assert int(ours.optimizer.iterations) == int(plain.optimizer.iterations) == 100
    for name, rows in initial.items():
        theirs = plain.get_layer(name).get_weights()[0]
        mine = store.lookup({name: np.arange(len(rows))})[name]
        _assert_close(mine, theirs, name)
        assert np.abs(mine - rows).max() > 1e-3, f"table {name} has not been trained"
    for name in ("hidden", "out"):
        for mine, theirs in zip(ours.get_layer(name).get_weights(), plain.get_layer(name).get_weights(), strict=True):
            _assert_close(mine, theirs, name)


def _assert_close(mine: np.ndarray, theirs: np.ndarray, name: str) -> None:
    relative = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
    assert relative <= 1e-5, f"{name} differs from plain Keras by {relative:.2e} of its norm"


def require_rows(source: RowSource, trained: Numbers) -> None:
    assert source.version() == 50
    for name in source.specs():
        rows = source.lookup({name: trained[f"{name}/ids"]})[name]
        np.testing.assert_array_equal(rows, trained[f"{name}/weights"], err_msg=name)


def test_every_table_and_variable_changes(alone: Numbers) -> None:
    """A gradient that gets lost on its way would leave its table as it was (ElasticDL lost one for months)."""
    for table, dim, size in (("words", 6, 40), ("alone", 4, 10), ("bags", 5, 40)):
        np.testing.assert_array_equal(alone[f"{table}/ids"], np.arange(size))
        assert alone[f"{table}/weights"].shape == (size, dim)
        # Adagrad's accumulator began at 0.1 everywhere and grows with every gradient.
        assert (alone[f"{table}/slots"] > 0.1).all()
    assert all(np.abs(value).max() > 0 for name, value in alone.items() if name.startswith("variables/"))


# tests/elastable/jobs/test_workers.py kills a worker of a job over memory.
def test_redis_gives_the_same_bits(alone: Numbers, tmp_path: Path, server_binary: Path) -> None:
    """Workers look rows up at the master, which alone has the password; rows are flushed and left all the time."""
    with running_server(server_binary, tmp_path / "redis", password="secret") as server:
        url = f"redis://:secret@{server.address}?budget=1MiB&flush=0.01"
        assert differing(alone, train(tmp_path, 2, "adagrad", store=url)) == []
        for follow in (False, True):
            with open_reader(url, follow) as reader:
                require_rows(reader, alone)


@pytest.mark.slow
def test_a_redis_cluster_gives_the_same_bits(alone: Numbers, tmp_path: Path, redis_cluster_url: str) -> None:
    assert differing(alone, train(tmp_path, 2, "adagrad", store=redis_cluster_url)) == []


@pytest.mark.slow
def test_sentinels_and_a_failover_give_the_same_bits(alone: Numbers, tmp_path: Path, server_binary: Path) -> None:
    """The replica takes over in the middle of the job, with everything that the old master confirmed."""
    # No failover but that one: on a busy machine a master may be silent for a while.
    with running_watched(server_binary, tmp_path / "redis", down_ms=600_000) as watched:
        url = f"{watched.url}&flush=0.05&deadline=200"
        assert differing(alone, train(tmp_path, 2, "adagrad", store=url, midway=watched.fail_over)) == []
        with open_store(url) as store:
            require_rows(store, alone)


# tests/chaos compares jobs over files with a log, flushed seldom and all the time.
def test_shards_give_the_same_bits(alone: Numbers, tmp_path: Path, redis_url: str) -> None:
    """One in Redis, the other in files without a log."""
    url = f"token:{redis_url}?namespace=shard,file://{tmp_path}/rows?budget=1MiB&log=none&flush=0.01"
    assert differing(alone, train(tmp_path, 2, "adagrad", store=url)) == []
    with open_store(url) as store:
        require_rows(store, alone)
