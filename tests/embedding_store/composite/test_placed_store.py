"""Tables in several stores, at one version."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastable.embedding_store import MemoryStore
from elastable.embedding_store.composite.partitioned_store import PlacedStore
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreFailed, Unavailable
from elastable.embedding_store.open_store import open_store
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore, commit, create_tables, dynamic, fixed, int64, update
from tests.embedding_store.disturbed_job import SPECS, commit_of, everything, undisturbed
from tests.embedding_store.store_kinds import FailingShard
from tests.file_stores import file_store


class TestPlacedStore(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        places = {"cities": "file", "fixed": "file", "half": "file", "t": "memory"}
        return lambda: PlacedStore({"memory": MemoryStore(2), "file": MemoryStore(1)}, places, default="memory")


def test_tables_are_where_they_were_placed() -> None:
    memory, file = MemoryStore(), MemoryStore()
    with PlacedStore({"memory": memory, "file": file}, {"large": "file"}, default="memory") as store:
        store.create_table(fixed("large", 4))
        store.create_table(dynamic("small", 2))
        assert list(memory.specs()) == ["small"]
        assert list(file.specs()) == ["large"]
        assert set(store.specs()) == {"small", "large"}
        assert (store.place("large"), store.place("small")) == ("file", "memory")
        commit(store, {"large": update(int64(1), 4)})
        assert (memory.version(), file.version(), store.version()) == (1, 1, 1)


PLACES = {"adam": "file", "adagrad": "flaky", "sgd": "redis"}


@pytest.fixture
def three(tmp_path: Path, redis_url: str) -> Iterator[tuple[PlacedStore, FailingShard]]:
    """Rows in files, in memory that fails on request, and in Redis, which commit in this order; at version 1."""
    flaky = FailingShard()
    stores = {
        "file": file_store(tmp_path / "rows"),
        "flaky": flaky,
        "redis": open_store(f"{redis_url}?namespace=three"),
    }
    with create_tables(PlacedStore(stores, PLACES, default="redis"), *SPECS.values()) as store:
        store.commit(commit_of(1))
        yield store, flaky


OTHERS = {
    "other gradients": replace(commit_of(2), updates=commit_of(3).updates),
    "another record": replace(commit_of(2), record=b"another"),
    "another step": replace(commit_of(2), step=7),
    "other rates": replace(commit_of(2), learning_rates=dict.fromkeys(SPECS, 0.02)),
    "fewer tables": commit_of(2, ("sgd",)),
    "the version after it": commit_of(3),
}


@pytest.mark.parametrize("after", [False, True], ids=["failed", "answer lost"])
def test_after_a_broken_commit_only_that_one_is_accepted(three: tuple[PlacedStore, FailingShard], after: bool) -> None:
    store, flaky = three
    flaky.failure, flaky.after = Unavailable("gone for a moment"), after
    with pytest.raises(Unavailable, match="gone for a moment"):
        store.commit(commit_of(2))
    if after:
        assert store.version() == 2  # every store has it, only the answer is missing
    else:
        assert store.version() == 1
        with pytest.raises(StoreFailed, match=r"version 1 on the flaky store; version 2 on the file store.*repeat it"):
            store.lookup({"sgd": int64(1)})
    half_done = everything(store)
    for other in OTHERS.values():
        with pytest.raises(StoreFailed, match=r"version 2 broke off.*that very commit"):
            store.commit(other)
        with pytest.raises(StoreFailed, match="that very commit"):
            store.stage(other)
    assert everything(store) == half_done
    store.commit(commit_of(2))
    assert store.version() == 2
    assert everything(store) == everything(undisturbed(2))
    store.commit(commit_of(3))
    assert everything(store) == everything(undisturbed(3))


def test_a_commit_of_another_process_is_neither_taken_for_ours_nor_taken_back(redis_url: str) -> None:
    urls = [f"{redis_url}?namespace=taken{number}" for number in range(2)]
    with PlacedStore(dict(zip("ab", map(open_store, urls), strict=True)), {"sgd": "b"}, "a") as store:
        create_tables(store, *SPECS.values())
        store.commit(commit_of(1))
    with open_store(urls[0]) as alone:
        alone.commit(commit_of(2, ("adam",)))
    with PlacedStore(dict(zip("ab", map(open_store, urls), strict=True)), {"sgd": "b"}, "a") as store:
        with pytest.raises(StoreFailed, match=r"the a store is at version 2 and the b store at 1.*recover the store"):
            store.commit(commit_of(2))
        with pytest.raises(StaleVersion, match=r"the a store: .*holds no version 1: version 2 is written"):
            store.recover()
        assert store.keeps_records


def test_a_place_without_a_store_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'tape'.*memory"):
        PlacedStore({"memory": MemoryStore()}, {"t": "tape"}, default="memory")
