"""A shard that dies, and one that comes back without its rows: one error, which names the shard, whatever was asked."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

from elastable.embedding_store import MemoryStore, RemoteSource, RemoteStore
from elastable.embedding_store.composite.partitioned_store import PartitionedSource, PartitionedStore
from elastable.embedding_store.errors import BadInput, NotReady, ShardAway, ShardLost, TableNotFound, TakenOver
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from tests.contracts.store_samples import commit, create_tables, dynamic, fixed, int64, update
from tests.embedding_store.serving import serving
from tests.ports import free_address

IDS = np.arange(12)
DEADLINE_S = 60.0
SHORT_DEADLINE_S = 1.0  # where what is asked for is away, and stays away


@dataclass
class Shard:
    """A parameter server on one port; it may be started again, with its rows or without."""

    store: MemoryStore = field(default_factory=lambda: MemoryStore(threads=1))
    server: GrpcServer | None = None
    address: str = field(default_factory=free_address)

    def start(self) -> None:
        self.server = serving(self.store, True, self.address)
        self.address = self.server.address

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(0.0)
            self.server = None

    def start_empty(self) -> None:
        self.stop()
        self.store = MemoryStore(threads=1)
        self.start()


def opened(held: ExitStack, shards: list[Shard], deadline_s: float, strategy: str = "token") -> PartitionedStore:
    return held.enter_context(PartitionedStore([RemoteStore(one.address, deadline_s) for one in shards], strategy))


def trained(held: ExitStack, strategy: str = "token") -> tuple[PartitionedStore, list[Shard]]:
    """A store of two servers, at version 2."""
    shards = [Shard(), Shard()]
    for shard in shards:
        shard.start()
        held.callback(shard.stop)
    store = create_tables(opened(held, shards, DEADLINE_S, strategy), *(fixed(dim=4), dynamic()))
    for seed in range(2):
        commit(store, {"cities": update(IDS, 4, seed), "people": update(IDS, 5, seed)})
    return store, shards


ASKED: dict[str, Callable[[PartitionedStore], object]] = {
    "version": lambda store: store.version(),
    "lookup": lambda store: store.lookup({"cities": IDS}),
    "lookup at a version": lambda store: store.lookup({"cities": IDS}, 2),
    "commit": lambda store: commit(store, {"cities": update(IDS, 4, 2)}),
    "pin": lambda store: store.pin(),
    "row_count": lambda store: store.row_count("people"),
    "scan": lambda store: list(store.scan("people")),
    "recover": lambda store: store.recover(),
}


@pytest.mark.parametrize(("asked", "strategy"), list(zip(ASKED, 4 * ["token", "encoding"], strict=True)))
def test_a_shard_without_its_rows_is_lost_whatever_is_asked(held: ExitStack, asked: str, strategy: str) -> None:
    store, shards = trained(held, strategy)
    shards[1].start_empty()
    with pytest.raises(ShardLost, match=r"^shard 1 of 2 is lost: it (is at version 0, and was at 2|lacks)"):
        ASKED[asked](store)


@pytest.mark.parametrize("asked", ["lookup at a version", "commit"])
def test_a_shard_that_is_away_is_asked_again_until_the_deadline_and_lost_then(held: ExitStack, asked: str) -> None:
    _, shards = trained(held)
    remotes = [RemoteStore(one.address, DEADLINE_S) for one in shards]
    store = held.enter_context(PartitionedStore(remotes))
    store.lookup({"cities": IDS})
    for remote in remotes:
        remote.connection.deadline_s = SHORT_DEADLINE_S
    shards[1].stop()
    with pytest.raises(ShardAway, match=rf"shard 1 of 2: {shards[1].address} cannot be reached"):
        ASKED[asked](store)
    with pytest.raises(ShardLost, match=r"shard 1 of 2: .*taken for lost, as it stayed away for .* 0\.1 s"):
        retry(lambda: ASKED[asked](store), asked, deadline_s=0.1)
    for remote in remotes:
        remote.connection.deadline_s = DEADLINE_S
    shards[1].start()
    retry(lambda: ASKED[asked](store), asked, deadline_s=60.0)


def test_a_reader_that_has_no_version_sees_it_by_the_tables(held: ExitStack) -> None:
    _, shards = trained(held)
    source = held.enter_context(PartitionedSource([RemoteSource(one.address, DEADLINE_S) for one in shards]))
    source.lookup({"cities": IDS})
    shards[0].start_empty()
    with pytest.raises(ShardLost, match=r"shard 0 of 2 is lost: it lacks tables that others hold \(cities, people\)"):
        source.lookup({"cities": IDS})


def test_a_table_that_is_dropped_everywhere_is_no_loss(held: ExitStack) -> None:
    store, shards = trained(held)
    source = held.enter_context(PartitionedSource([RemoteSource(one.address, DEADLINE_S) for one in shards]))
    source.lookup({"cities": IDS})
    store.drop_table("cities")
    with pytest.raises(TableNotFound, match=r"shard 0 of 2: no table 'cities'"):
        source.lookup({"cities": int64(2)})


def test_rows_of_a_table_that_a_shard_has_lost_are_no_beginning(held: ExitStack) -> None:
    """They would be taken for rows of the table that is made in its place."""
    _, shards = trained(held)
    shards[1].start_empty()
    store = opened(held, shards, DEADLINE_S)
    assert store.specs() == {}
    with pytest.raises(ShardLost, match=r"shard 1 of 2 is lost: it lacks table 'cities', of which others hold 6 rows"):
        store.create_table(fixed(dim=4))
    for name in ("cities", "people"):
        store.drop_table(name)
    store.reset_version(0)
    assert store.create_table(fixed(dim=4))
    assert store.row_count("cities") == 0


def test_of_several_errors_that_of_the_lost_shard_is_raised(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    group = held.enter_context(PartitionedStore([MemoryStore(threads=1) for _ in range(4)])).group
    monkeypatch.setattr(group, "_why_lost", lambda shard, error: "its rows are gone" if shard == 2 else "")
    errors = {0: BadInput("a"), 1: ShardAway("b"), 2: TableNotFound("c"), 3: NotReady("d")}
    for expected, kind in (("shard 2 of 4 is lost: its rows are gone", ShardLost), ("shard 1 of 4: b", ShardAway)):
        with pytest.raises(kind, match=expected):
            group.raise_first(errors)
        del errors[2 if kind is ShardLost else 1]
    with pytest.raises(NotReady, match="shard 3 of 4: d"):
        group.raise_first({3: errors[3]})
    with pytest.raises(TakenOver, match="shard 3 of 4: e"):
        group.raise_first({**errors, 3: TakenOver("e")})
