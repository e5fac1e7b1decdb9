"""Tables that take no step in a commit, in every store whose rows can follow every step."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import BadInput, Commit, EvictionSpec, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from tests.embedding_store.engine.test_catch_up_stores import STORES
from tests.embedding_store.engine.test_replay_epochs import everything, restore

DIM, ROWS = 6, 30
ADAMW = OptimizerSpec.of("adamw", lazy=False, learning_rate=0.01, weight_decay=0.1)
FROZEN = range(5, 9)


def update(number: int) -> TableUpdate:
    random = np.random.default_rng(number)
    ids = random.choice(ROWS - 5, size=3, replace=False)
    return TableUpdate(ids, random.normal(size=(3, DIM)).astype(np.float32))


def step(store: EmbeddingStore, version: int, iterations: int, frozen: bool, ends: bool = False) -> None:
    updates = {} if frozen else {"t": update(version)}
    rates = {"t": 0.01 + 0.005 * float(np.sin(iterations))}
    store.commit(Commit(version, updates, iterations, rates, ends_replay_epoch=ends, frozen=("t",) if frozen else ()))


def made(store: EmbeddingStore) -> EmbeddingStore:
    store.create_table(TableSpec("t", DIM, ROWS, optimizer=ADAMW))
    return store


@pytest.mark.parametrize("kind", STORES)
def test_commits_that_freeze_a_table_leave_every_bit_of_it(kind: str, tmp_path: Path) -> None:
    with ExitStack() as held, made(STORES[kind](held, tmp_path)) as store, made(MemoryStore(1)) as without:
        version, before = 0, everything(store)
        for number in range(1, 13):
            step(store, number, number - 1, frozen=number in FROZEN)
            if number in FROZEN:
                assert everything(store) == before
                continue
            version += 1
            # The same steps, and no others; only the versions are others.
            random = update(number)
            rates = {"t": 0.01 + 0.005 * float(np.sin(number - 1))}
            without.commit(Commit(version, {"t": random}, number - 1, rates))
            before = everything(store)
            np.testing.assert_allclose(rows(store), rows(without), rtol=1e-6, atol=1e-7)
        if kind in ("memory", "indexed", "file", "shared", "remote"):
            assert everything(store) == everything(without)


def rows(store: EmbeddingStore) -> np.ndarray:
    return store.lookup({"t": np.arange(ROWS)})["t"]


def test_a_table_restored_while_it_is_frozen_goes_on_with_the_same_bits() -> None:
    with made(MemoryStore(1)) as whole, made(MemoryStore(1)) as killed, MemoryStore(1) as restored:
        stores = [whole, killed]
        for number in range(1, 13):
            for store in stores:
                step(store, number, number - 1, frozen=number in FROZEN, ends=number in (3, 7, 8))
            if number == 7:
                restore(killed, restored, number)
                stores[1] = restored
        assert everything(restored) == everything(whole)


def test_no_row_of_a_frozen_table_is_evicted() -> None:
    with MemoryStore(1) as store:
        store.create_table(
            TableSpec("t", DIM, None, optimizer=OptimizerSpec.of("sgd"), eviction=EvictionSpec(max_age=2))
        )
        store.commit(Commit(1, {"t": update(1)}, 0, {}))
        for version in range(2, 9):
            store.commit(Commit(version, {}, version - 1, {}, frozen=("t",)))
        assert store.row_count("t") == 3
        store.commit(Commit(9, {}, 8, {}))
        assert store.row_count("t") == 0


def test_a_commit_cannot_both_freeze_a_table_and_update_it() -> None:
    with pytest.raises(BadInput, match="says are frozen: 't'"):
        Commit(1, {"t": update(1)}, 0, {}, frozen=("t",))
