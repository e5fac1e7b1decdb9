"""Errors put into a process on purpose: a suite that does not notice them would notice nothing."""

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.chaos.schedules import Fault, Schedule, Shape
from tests.chaos.stores import store_of

if TYPE_CHECKING:
    from elastable.embedding_store.log.changes import CommitImages
    from elastable.master.api import Push, PushReply
    from elastable.master.commits.push_protocol import Ticket, Verdict


SABOTAGES: dict[str, dict[str, Callable[[], None]]] = {}
"""By name and role, what puts an error into a process. "repeated-push" is none: a right master counts it once."""

PROOFS: dict[str, Schedule] = {}
"""A schedule in which each shows. "keeps-nobody-out" has none: it shows only where the first master happens to wake up
between two commits of the second."""

_PutIn = Callable[[], None]


def _error(name: str, role: str, proof: Schedule | None = None) -> Callable[[_PutIn], _PutIn]:
    """Declares an error of processes of a role."""

    def declared(put_in: _PutIn) -> _PutIn:
        SABOTAGES.setdefault(name, {})[role] = put_in
        if proof is not None:
            PROOFS[name] = proof
        return put_in

    return declared


def _proof(kind: str, optimizer: str, *faults: Fault) -> Schedule:
    lazy = kind != "every"
    shape = Shape("light", optimizer, 4, lazy=lazy, replay_epoch=0 if lazy else 2)
    return Schedule(kind, 0, shape, 2, 2, 3, "grpc", faults, store=store_of(kind, 0))


_KILLED = Fault("version", 9, "kill", "master", 0.1)


def _in_place_of(owner: object, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts a function into the place of another one, which it gets as its first argument."""
    plain = getattr(owner, name)

    def put_in(wrong: Callable[..., Any]) -> Callable[..., Any]:
        setattr(owner, name, lambda *arguments, **named: wrong(plain, *arguments, **named))
        return wrong

    return put_in


@_error("counts-twice", "worker")
@_error("repeated-push", "worker", _proof("memory", "adagrad", Fault("computed", 30, "cut", "worker-master", 0.1)))
def _repeated_push() -> None:
    """A worker's retry trains its records once more."""
    from elastable.master.rpc.client import MasterClient

    pushes = itertools.count(1)

    @_in_place_of(MasterClient, "report_gradient")
    def twice(plain: Any, self: MasterClient, push: "Push") -> "PushReply":
        if next(pushes) % 7 == 0:  # as if the first answer had been lost
            plain(self, push)
        return plain(self, push)


@_error("counts-twice", "master", _proof("memory", "sgd"))
def _takes_again() -> None:
    """A master that takes a repeated push for a new one."""
    from elastable.master.commits.push_protocol import SyncPushes, Ticket

    again: list[Ticket] = []

    @_in_place_of(SyncPushes, "judge")
    def judge(plain: Any, self: SyncPushes, push: "Push", version: int) -> "Verdict | Ticket | None":
        found = plain(self, push, version)
        if isinstance(found, tuple) and found[0] == "duplicate":
            again.append(Ticket(push, push.id))
        return found

    @_in_place_of(SyncPushes, "ready")
    def ready(plain: Any, self: SyncPushes) -> list[Ticket] | None:
        tickets = plain(self)
        return None if tickets is None else [*tickets, *again]

    @_in_place_of(SyncPushes, "commit")
    def commit(plain: Any, self: SyncPushes) -> bool:
        again.clear()
        return plain(self)


@_error("forgets-slots", "master", _proof("memory", "adam", _KILLED))
def _forgets_slots() -> None:
    """A master that restores rows without what their optimizer knew."""
    from elastable.embedding_store.contract.row_data import RowBlock
    from elastable.embedding_store.engine.memory_store import MemoryStore

    @_in_place_of(MemoryStore, "put")
    def put(plain: Any, self: MemoryStore, table: str, blocks: Iterable[RowBlock]) -> None:
        plain(self, table, (RowBlock(block.ids, block.weights, np.ones_like(block.slots)) for block in blocks))


@_error("loses-a-micro-batch", "master", _proof("memory", "adagrad"))
def _loses_a_micro_batch() -> None:
    """A master that makes a version without its last micro-batch, once."""
    from elastable.master.commits.push_protocol import SyncPushes

    made: list[SyncPushes] = []

    @_in_place_of(SyncPushes, "ready")
    def ready(plain: Any, self: SyncPushes) -> "list[Ticket] | None":
        tickets = plain(self)
        return tickets[:-1] if tickets is not None and len(made) == 4 else tickets

    @_in_place_of(SyncPushes, "commit")
    def commit(plain: Any, self: SyncPushes) -> bool:
        made.append(self)
        return plain(self)


@_error("old-checkpoint", "master", _proof("memory", "sgd", _KILLED))
def _old_checkpoint() -> None:
    """A master that goes on from an older checkpoint than the newest: the numbers are right, versions are lost."""
    from elastable.jobs import prepare

    @_in_place_of(prepare, "newest_checkpoint")
    def oldest(plain: Any, place: str | Path) -> str | None:
        return plain(place) and str(min(Path(place).glob("ckpt-*")))


@_error("forgets-an-entry", "master", _proof("redis", "adam", _KILLED))
def _forgets_an_entry() -> None:
    """A master that takes over and replays the log without the rows of its commits."""
    if os.environ["CHAOS_LIFE"] == "1":
        return
    from elastable.embedding_store.engine.store_history import ReplayedTables

    @_in_place_of(ReplayedTables, "_commit")
    def commit(plain: Any, self: ReplayedTables, images: "CommitImages", version: int) -> None:
        plain(self, replace(images, tables=[]), version)


@_error("forgets-a-shard", "master", _proof("shards", "adam", Fault("half", 10, "kill", "master", 0.1)))
def _forgets_a_shard() -> None:
    """A recovery that takes a version back from a shard's log, and leaves its rows as the dead master left them."""
    from elastable.embedding_store.engine.memory_store import MemoryStore

    @_in_place_of(MemoryStore, "recover")
    def recover(plain: Any, self: MemoryStore, version: int | None = None) -> int:
        if version is None or version != self.version() - 1:
            return plain(self, version)
        blocks = {name: list(self.scan(name)) for name in self.specs()}
        rows = plain(self, version)
        for name, of_table in blocks.items():
            self.put(name, of_table)
        return rows


@_error("forgets-a-replay-epoch", "master", _proof("every", "adam", _KILLED))
def _forgets_a_replay_epoch() -> None:
    """A master that takes over and rounds rows where it saves them, and no more where the schedule says so."""
    if os.environ["CHAOS_LIFE"] == "1":
        return
    from elastable.master.commits.committer import Committer

    @_in_place_of(Committer, "__init__")
    def begin(plain: Any, self: Committer, *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **named)
        self._ends_replay_epoch = lambda version: False


@_error("keeps-nobody-out", "master")
def _keeps_nobody_out() -> None:
    """A master that takes over and does not keep the one before it from writing."""
    from elastable.embedding_store.tiers.redis.redis_place import RedisPlace

    RedisPlace._end_others = lambda *_: None  # type: ignore[method-assign]
    RedisPlace.require = lambda *_: None  # type: ignore[method-assign]
