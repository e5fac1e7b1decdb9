"""Commits that break off on some shards: what is said, what is refused, and how the very same commit repairs it."""

from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, PartitionedStore, TableSpec
from elastable.embedding_store.errors import (
    BadInput,
    BadSpec,
    SpecConflict,
    StaleVersion,
    StoreFailed,
    TableNotFound,
    Unavailable,
    Unsupported,
)
from elastable.embedding_store.open_store import open_store
from tests.contracts.store_samples import commit, create_tables, dynamic, fixed, int64, update
from tests.cutting_proxy import cutting_proxy
from tests.embedding_store.disturbed_job import IDS as JOB_IDS
from tests.embedding_store.disturbed_job import SPECS, commit_of, everything, undisturbed
from tests.embedding_store.dying_writer import abandon
from tests.embedding_store.store_kinds import FailingShard
from tests.servers import Server

IDS = np.arange(12)


def broken(strategy: str = "token") -> tuple[PartitionedStore, list[FailingShard]]:
    """A store at version 1, whose shard 1 has failed at version 2."""
    shards = [FailingShard() for _ in range(3)]
    store = create_tables(PartitionedStore(shards, strategy), *SPECS.values())
    store.commit(commit_of(1))
    shards[1].failure = Unavailable("the cable")
    with pytest.raises(StoreFailed, match=r"version 2.*shard 1 of 3.*repeat the same commit.*shard 1 of 3: the cable"):
        store.commit(commit_of(2))
    return store, shards


@pytest.mark.parametrize("strategy", ["token", "encoding"])
def test_the_same_commit_repairs_it(strategy: str) -> None:
    store, shards = broken(strategy)
    with store:
        assert store.version() == 1
        assert [shard.version() for shard in shards] == [2, 1, 2]
        with pytest.raises(StoreFailed, match=r"1 on shard 1 of 3; version 2 on shard 0 of 3, shard 2 of 3.*repeat it"):
            store.lookup({"adam": IDS})
        with pytest.raises(StaleVersion, match="shard 0 of 3: version 1 is past"):
            store.lookup({"adam": IDS}, version=1)
        updates = commit_of(2).updates
        fewer = replace(updates["adam"], ids=updates["adam"].ids[:5], gradients=updates["adam"].gradients[:5])
        for other in (commit_of(3).updates, {**updates, "adam": fewer}):
            with pytest.raises(StoreFailed, match=r"version 2 broke off.*that very commit"):
                store.commit(replace(commit_of(2), updates=other))
        with pytest.raises(StoreFailed, match="that very commit"):
            store.commit(replace(commit_of(2), version=3, step=2))
        store.commit(commit_of(2))
        assert store.version() == 2
        store.lookup({"adam": IDS}, version=2)
        store.commit(commit_of(3))
        assert everything(store) == everything(undisturbed(3))


def test_restored_rows_end_it() -> None:
    store, _ = broken()
    store.clear("adam")
    store.reset_version(7)
    assert (store.version(), store.row_count("adam")) == (7, 0)
    store.lookup({"adam": IDS})
    store.commit(commit_of(8))


def test_where_nothing_stands_nothing_has_to_be_repeated() -> None:
    shards = [FailingShard() for _ in range(3)]
    with create_tables(PartitionedStore(shards), fixed(dim=5)) as store:
        shards[1].failure = BadInput("not this one")
        with pytest.raises(BadInput, match="shard 1 of 3: not this one"):
            commit(store, {"cities": update(int64(1, 4), 5)})  # shards without rows come last
        assert [shard.version() for shard in shards] == [0, 0, 0]
        commit(store, {"cities": update(int64(7), 5)})
        store.lookup({"cities": IDS})


def test_who_else_writes() -> None:
    shards = [MemoryStore(threads=1) for _ in range(2)]
    with create_tables(PartitionedStore(shards), fixed(dim=5)) as store:
        shards[0].reset_version(5)
        with pytest.raises(StoreFailed, match="shard 0 of 2 is at version 5 and shard 1 of 2 at 0, by a commit"):
            commit(store, {"cities": update(IDS, 5)})


def test_a_table_that_was_begun_is_completed_or_dropped() -> None:
    shards = [MemoryStore(threads=1) for _ in range(3)]
    PartitionedStore(shards, "encoding").create_table(fixed(dim=8))
    shards[2].drop_table("cities")
    store = PartitionedStore(shards, "encoding")
    assert store.specs() == {}
    with pytest.raises(TableNotFound, match="'cities'"):
        store.lookup({"cities": IDS})
    with pytest.raises(SpecConflict, match=r"'cities'.*dim is 8, not 7"):
        store.create_table(fixed(dim=7))
    with pytest.raises(SpecConflict, match=r"'cities'.*another strategy"):
        PartitionedStore(shards, "token").create_table(fixed(dim=8))
    assert store.create_table(fixed(dim=8))
    assert not store.create_table(fixed(dim=8))
    commit(store, {"cities": update(IDS, 8)})
    shards[0].drop_table("cities")
    store.drop_table("cities")
    assert [shard.specs() for shard in shards] == [{}, {}, {}]


def test_a_backend_that_refuses_its_part_leaves_no_table_behind() -> None:
    class Picky(MemoryStore):
        def create_table(self, spec: TableSpec) -> bool:
            raise Unsupported(f"table {spec.name!r}: not here")

    shards = [MemoryStore(threads=1), Picky(threads=1), MemoryStore(threads=1)]
    with PartitionedStore(shards) as store:
        with pytest.raises(Unsupported, match="shard 1 of 3: table 'people': not here"):
            store.create_table(dynamic())
        assert [shard.specs() for shard in shards] == [{}, {}, {}]


def test_shards_given_in_another_order_or_number_are_refused() -> None:
    shards = [MemoryStore(threads=1) for _ in range(3)]
    PartitionedStore(shards).create_table(fixed(dim=5))
    for others in (shards[::-1], shards[:2]):
        with pytest.raises(StoreFailed, match=r"'cities'"):
            PartitionedStore(others).lookup({"cities": IDS})
    with PartitionedStore(shards, "encoding") as store:  # what is there says itself how it was split
        commit(store, {"cities": update(IDS, 5)})
        assert sum(shard.row_count("cities") for shard in shards) == 12


def test_each_table_may_be_split_in_its_own_way() -> None:
    shards = [MemoryStore(threads=1) for _ in range(2)]
    with PartitionedStore(shards, "token", strategies={"people": "encoding"}) as store:
        create_tables(store, *(fixed(dim=5), dynamic()))
        commit(store, {"cities": update(IDS, 5), "people": update(IDS, 5)})
        assert [shard.row_count("cities") for shard in shards] == [6, 6]
        assert [shard.row_count("people") for shard in shards] == [12, 12]
        assert [shard.specs()["people"].dim for shard in shards] == [3, 2]
        assert [store.row_count(name) for name in ("cities", "people")] == [12, 12]


def test_whoever_reads_what_is_closed_learns_it_of_the_whole() -> None:
    store = PartitionedStore([MemoryStore(threads=1), MemoryStore(threads=1)])
    store.create_table(TableSpec("cities", 2, 9))
    store.close()
    with pytest.raises(StoreFailed, match="the store is closed"):
        store.lookup({"cities": np.array([1])})


def test_bad_arguments() -> None:
    with pytest.raises(BadSpec, match=r"strategy 'rows'; known strategies are token, encoding"):
        PartitionedStore([MemoryStore(threads=1)], "rows")
    with pytest.raises(BadSpec, match=r"table 'people': strategy 'x'"):
        PartitionedStore([MemoryStore(threads=1)], strategies={"people": "x"})
    with pytest.raises(BadInput, match="at least one"):
        PartitionedStore([])
    one = MemoryStore(threads=1)
    with pytest.raises(BadInput, match="given twice"):
        PartitionedStore([one, one])


@pytest.mark.parametrize(
    ("strategy", "same_process", "logged"),
    [("token", True, True), ("encoding", False, True), ("encoding", True, False)],
)
def test_a_redis_that_dies_amid_a_commit(durable: Server, strategy: str, same_process: bool, logged: bool) -> None:
    """Its shard does not know whether the commit is in its log; the shard in memory has made it."""
    memory = MemoryStore(threads=1)
    with cutting_proxy(durable.port) as proxy:
        redis = open_store(f"redis://127.0.0.1:{proxy.port}", deadline_s=2.0)
        store = create_tables(PartitionedStore([redis, memory], strategy), *SPECS.values())
        store.commit(commit_of(1))
        if logged:
            proxy.when_cut, proxy.transactions = durable.kill, 1
        else:
            durable.kill()
        with pytest.raises(StoreFailed, match=r"version 2 did not end on shard 0 of 2, .*; repeat the same commit"):
            store.commit(commit_of(2))
        durable.start()
        assert (memory.version(), redis.version()) == (2, 1)
        with pytest.raises(StoreFailed):
            store.lookup(dict.fromkeys(SPECS, JOB_IDS))
        with pytest.raises(StoreFailed, match="that very commit"):
            store.commit(Commit(2, {}, 1, {}))
        if not same_process:
            abandon(redis)
            redis.close()
            store = PartitionedStore([open_store(durable.url), memory], strategy)
        with store:
            if same_process or not logged:
                store.commit(commit_of(2))
            store.commit(commit_of(3))
            assert store.version() == 3
            assert everything(store) == everything(undisturbed(3))
