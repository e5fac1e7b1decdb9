"""Rows looked up ahead are those of their version, or none."""

from collections.abc import Iterator, Mapping
from contextlib import closing

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import IdOutOfRange, Unavailable
from elastable.master.api import Task, TaskKind
from elastable.worker.runtime.compute import Prepared
from elastable.worker.runtime.loop import RowsAhead
from elastable.worker.step.id_set import IdSets

IDS = np.arange(4)
SPEC = TableSpec("t", 2, 10, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))


def prepared(version: int, ids: Int64 = IDS) -> Prepared:
    task = Task(version, TaskKind.TRAIN, version, 0, 0, 4)
    return Prepared(task, (), IdSets({"t": ids} if len(ids) else {}, []), 4)


def commit(store: MemoryStore, version: int) -> Float32:
    store.commit(Commit(version, {"t": TableUpdate(IDS, np.ones((4, 2), np.float32))}, version - 1, {}))
    return store.lookup({"t": IDS})["t"]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(threads=1) as store:
        store.create_table(SPEC)
        yield store


@pytest.fixture
def ahead(store: MemoryStore) -> Iterator[RowsAhead]:
    ahead = RowsAhead(store, deadline_s=30.0)
    yield ahead
    ahead.close()


def test_a_lookup_waits_for_its_version(store: MemoryStore, ahead: RowsAhead) -> None:
    # The first commit compiles its kernels, which may take longer than a lookup waits.
    commit(store, 1)
    following = prepared(2)
    ahead.begin(following)
    rows = commit(store, 2)
    found = ahead.take(following)
    assert found is not None
    np.testing.assert_array_equal(found["t"], rows)


def test_a_version_that_stays_away_is_left_to_the_worker(ahead: RowsAhead) -> None:
    following = prepared(1)
    ahead.begin(following)
    assert ahead.take(following) is None


def test_nothing_is_given_that_was_not_asked_for(store: MemoryStore, ahead: RowsAhead) -> None:
    assert ahead.take(prepared(0)) is None
    following = prepared(0)
    ahead.begin(following)
    ahead.forget()
    assert ahead.take(following) is None
    ahead.begin(None)
    empty = prepared(0, IDS[:0])
    ahead.begin(empty)
    assert ahead.take(empty) is None


def test_what_is_wrong_with_the_ids_is_reported(ahead: RowsAhead) -> None:
    following = prepared(0, np.array([10]))
    ahead.begin(following)
    with pytest.raises(IdOutOfRange, match="id 10"):
        ahead.take(following)


class _Away(MemoryStore):
    def lookup_when(self, ids: object, version: int, wait_s: float) -> dict[str, Float32]:
        raise Unavailable("away")


def test_a_source_that_is_away_is_left_to_the_workers_patience() -> None:
    with _Away() as store:
        ahead = RowsAhead(store, deadline_s=30.0)
        following = prepared(0)
        ahead.begin(following)
        assert ahead.take(following) is None
        ahead.close()


def test_one_lookup_is_under_way_at_a_time(store: MemoryStore, ahead: RowsAhead) -> None:
    first, second = prepared(1), prepared(0)
    ahead.begin(first)
    ahead.begin(second)  # the first one waits for its version: this one is not begun
    assert ahead.take(second) is None
    commit(store, 1)
    assert ahead.take(first) is not None


def test_cold_rows_are_brought_near_and_looked_up_by_the_worker() -> None:
    """Of a worker in its master's thread, whose version only that thread commits."""
    asked = []

    class Cold(MemoryStore):
        def read_ahead(self, ids: Mapping[str, Int64]) -> None:
            asked.append(ids)

    with Cold(threads=1) as store, closing(RowsAhead(store, deadline_s=30.0)) as ahead:
        following = prepared(1)
        ahead.begin(following, store)
        assert ahead.take(following) is None
        assert asked == [following.ids.unique]
