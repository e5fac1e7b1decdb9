"""Eight threads on one store, beyond what every store promises of them: first touches, closing, counts of shards."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, PartitionedStore, TableUpdate, initial_rows
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import StoreFailed, TableNotFound
from tests.contracts.store_samples import create_tables
from tests.embedding_store.store_kinds import KINDS
from tests.threads import JOIN_S, on_threads

THREADS = 8
DIM = 16
SUMS = TableSpec("sums", DIM, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"))
RACING = pytest.mark.parametrize("kind", ["memory, indexed", "files", "token 3, mixed"])
FRESH = TableSpec("fresh", DIM, optimizer=OptimizerSpec.of("adagrad"), seed=4)


@RACING
def test_first_touches_beside_lookups(kind: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(-(2**62), 2**62, 6000)
    before, versions, done = initial_rows(FRESH, ids), 20, threading.Event()
    after = before - np.float32(0.001) / np.sqrt(np.float32(0.1) + np.float32(1) + np.float32(1e-7))
    with create_tables(KINDS[kind](tmp_path), FRESH) as store:
        share = len(ids) // versions

        def touch() -> None:
            for version in range(1, versions + 1):
                part = ids[(version - 1) * share : version * share]
                update = TableUpdate(part, np.ones((len(part), DIM), np.float32))
                store.commit(Commit(version, {"fresh": update}, version - 1, {}))
            done.set()

        def look(number: int) -> None:
            random = np.random.default_rng(number)
            seen = 0
            while not done.is_set():
                places = random.permutation(len(ids))[:400]
                rows = store.lookup({"fresh": ids[places]})["fresh"]
                fresh = (rows == before[places]).all(axis=1)
                touched = (rows == after[places]).all(axis=1)
                assert (fresh | touched).all(), "neither initial nor updated"
                parts = places // share
                newest = int(parts[touched].max(initial=-1))
                assert touched[parts <= newest].all(), "two versions in one lookup"
                assert newest >= seen - 1, "an older version than before"
                seen = max(seen, newest)

        on_threads([touch, *(partial(look, number) for number in range(THREADS - 1))], done)
        assert store.row_count("fresh") == versions * share
        np.testing.assert_array_equal(store.lookup({"fresh": ids[: versions * share]})["fresh"], after)


@RACING
def test_a_store_that_is_closed_beside_lookups_says_so(kind: str, tmp_path: Path) -> None:
    ids, done = np.arange(20_000), threading.Event()
    store = create_tables(KINDS[kind](tmp_path), SUMS)

    def look() -> None:
        try:
            for _ in range(10_000):
                store.lookup({"sums": ids})
                done.set()
        except (StoreFailed, TableNotFound):
            return
        raise AssertionError("the closed store went on answering")

    def close() -> None:
        assert done.wait(JOIN_S)
        store.close()

    on_threads([*[look] * (THREADS - 1), close], done)


class _Held(MemoryStore):
    def __init__(self) -> None:
        super().__init__(threads=1)
        self.reached, self.go = threading.Event(), threading.Event()

    def stage(self, commit: Commit) -> Callable[[], None]:
        finish = super().stage(commit)

        def held() -> None:
            self.reached.set()
            assert self.go.wait(JOIN_S)
            finish()

        return held


def test_what_shards_count_is_of_one_version() -> None:
    slow, counted = _Held(), []
    with create_tables(PartitionedStore([MemoryStore(threads=1), slow]), SUMS) as store:
        update = TableUpdate(np.arange(300), np.ones((300, DIM), np.float32))
        committing = threading.Thread(target=store.commit, args=(Commit(1, {"sums": update}, 0, {}),))
        counting = [
            threading.Thread(target=lambda: counted.append(store.row_count("sums"))),
            threading.Thread(target=lambda: counted.append(store.table_statistics("sums").rows)),
        ]
        committing.start()
        assert slow.reached.wait(JOIN_S)
        for thread in counting:
            thread.start()
            thread.join(0.1)
        slow.go.set()
        for thread in (committing, *counting):
            thread.join(JOIN_S)
    assert counted == [300, 300]
