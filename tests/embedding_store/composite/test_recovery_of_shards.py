"""A commit over several stores that broke off: all of them go back to the version that each has."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from elastable.embedding_store import Commit, EmbeddingStore, MemoryStore
from elastable.embedding_store.composite.partitioned_store import PartitionedStore, PlacedStore
from elastable.embedding_store.composite.store_group import StoreGroup
from elastable.embedding_store.errors import ShardLost, StaleVersion, StoreFailed
from elastable.embedding_store.open_store import open_reader, open_store
from tests.contracts.store_samples import create_tables
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, undisturbed
from tests.embedding_store.dying_writer import Died, abandon, dying_after

pytestmark = pytest.mark.process

PLACES = {"adam": "near", "adagrad": "far", "sgd": "far"}


def with_record(version: int) -> Commit:
    return replace(commit_of(version), record=b"record %d" % version)


def by_id(urls: list[str]) -> EmbeddingStore:
    return PartitionedStore([open_store(url) for url in urls])


def by_column(urls: list[str]) -> EmbeddingStore:
    return PartitionedStore([open_store(url) for url in urls], "encoding")


def by_table(urls: list[str]) -> EmbeddingStore:
    return PlacedStore(dict(zip(("near", "far"), map(open_store, urls), strict=True)), PLACES, "near")


def filled(store: EmbeddingStore, versions: int) -> EmbeddingStore:
    create_tables(store, *SPECS.values())
    for version in range(1, versions + 1):
        store.commit(with_record(version))
    return store


@pytest.fixture
def urls(redis_url: str) -> Callable[[str], list[str]]:
    def two(name: str) -> list[str]:
        return [f"{redis_url}?namespace={name}/{shard}&partitions=2" for shard in range(2)]

    return two


@pytest.mark.parametrize("joined", [by_id, by_column, by_table])
def test_a_commit_at_every_point(
    urls: Callable[[str], list[str]], joined: Callable[[list[str]], EmbeddingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    with undisturbed(2) as two, undisturbed(4) as four:
        before, after = everything(two), everything(four)
    apart = list[int]()
    for writes in count(1):
        places = urls(f"{joined.__name__}/{writes}")
        with filled(joined(places), 2) as store:
            assert store.keeps_records
            # One shard after the other: threads would die each by itself.
            monkeypatch.setattr(StoreGroup, "outcomes", in_turn)
            try:
                with dying_after(monkeypatch, writes):
                    store.commit(with_record(3))
                break
            except Died:
                for shard in store.group.sources:  # type: ignore[attr-defined]
                    abandon(shard)
        versions = list(map(version_at, places))
        apart.append(len(set(versions)))
        with joined(places) as successor:
            current = successor.version()
            assert current == min(versions)
            taken = successor.recover()
            assert (taken > 0) == (current == 2)
            assert successor.version() == current
            assert successor.record() == b"record %d" % current
            if current == 2:
                assert everything(successor) == before
            assert successor.lookup(dict.fromkeys(SPECS, IDS), current)
            for version in range(current + 1, 5):
                successor.commit(with_record(version))
            assert (everything(successor), successor.record()) == (after, b"record 4")
    assert 2 in apart


def version_at(url: str) -> int:
    with open_reader(url, follow=True) as reader:
        return reader.version()


def in_turn(
    self: object, calls: dict[int, Callable[[], object]], together: bool = True
) -> tuple[dict[int, object], dict[int, Exception]]:
    results, errors = dict[int, object](), dict[int, Exception]()
    for shard, call in calls.items():
        try:
            results[shard] = call()
        except Exception as error:  # noqa: BLE001 - as the calls it stands for
            errors[shard] = error
    return results, errors


def test_shards_that_cannot_meet(urls: Callable[[str], list[str]]) -> None:
    one, other = urls("far/apart")
    with filled(by_id([one, other]), 2) as store:
        with pytest.raises(StaleVersion, match="version 0 is past"):
            store.recover(0)
        with open_store(one) as alone:
            for version in (3, 4):
                alone.commit(Commit(version, {}, version - 1, {}))
    with by_id([one, other]) as store:
        with pytest.raises(StoreFailed, match="a commit broke off; repeat it"):
            store.record()
        with pytest.raises(ShardLost, match="shard 1 of 2 is lost: it is at version 2, and others at 4"):
            store.recover()


def test_memory_keeps_no_records(urls: Callable[[str], list[str]]) -> None:
    one, _ = urls("mixed")
    with filled(PlacedStore({"near": MemoryStore(threads=1), "far": open_store(one)}, PLACES, "near"), 2) as store:
        assert not store.keeps_records
        assert store.recover() == 0
        with pytest.raises(StaleVersion):
            store.recover(1)
