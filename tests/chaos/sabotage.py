"""Errors put into a process on purpose: a suite that does not notice them would notice nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import numpy as np

from tests.chaos.schedules import Fault, Schedule, Shape
from tests.chaos.stores import store_of

if TYPE_CHECKING:
    from elastable.embedding_store.contract.row_data import RowBlock
    from elastable.embedding_store.engine import MemoryStore
    from elastable.embedding_store.log.changes import CommitImages
    from elastable.master.api import Push, PushReply
    from elastable.master.commits.push_protocol import Ticket, Verdict

__all__ = ["PROOFS", "SABOTAGES"]

P = ParamSpec("P")


def _repeated_push(role: str) -> None:
    """A worker's retry trains its records once more."""
    if role != "worker":
        return
    from elastable.master.wire.client import MasterClient

    plain = MasterClient.report_gradient
    pushes = 0

    def twice(self: MasterClient, push: Push) -> PushReply:
        nonlocal pushes
        pushes += 1
        if pushes % 7 == 0:  # as if the first answer had been lost
            plain(self, push)
        return plain(self, push)

    MasterClient.report_gradient = twice  # type: ignore[method-assign]


def _counts_twice(role: str) -> None:
    """A master that takes a repeated push for a new one."""
    _repeated_push(role)
    if role != "master":
        return
    from elastable.master.commits.push_protocol import SyncPushes, Ticket

    plain_ready, plain_judge, plain_commit = SyncPushes.ready, SyncPushes.judge, SyncPushes.commit
    again: list[Ticket] = []

    def judge(self: SyncPushes, push: Push, version: int) -> Verdict | Ticket | None:
        found = plain_judge(self, push, version)
        if isinstance(found, tuple) and found[0] == "duplicate":
            again.append(Ticket(push, push.id))
        return found

    def ready(self: SyncPushes) -> list[Ticket] | None:
        tickets = plain_ready(self)
        return None if tickets is None else [*tickets, *again]

    def commit(self: SyncPushes) -> bool:
        again.clear()
        return plain_commit(self)

    SyncPushes.commit = commit  # type: ignore[method-assign]
    SyncPushes.judge = judge  # type: ignore[method-assign]
    SyncPushes.ready = ready  # type: ignore[method-assign]


def _forgets_slots(role: str) -> None:
    """A master that restores rows without what their optimizer knew."""
    if role != "master":
        return
    from elastable.embedding_store.contract.row_data import RowBlock
    from elastable.embedding_store.engine import MemoryStore

    plain = MemoryStore.put

    def put(self: MemoryStore, table: str, blocks: Iterable[RowBlock]) -> None:
        plain(self, table, (RowBlock(block.ids, block.weights, np.ones_like(block.slots)) for block in blocks))

    MemoryStore.put = put  # type: ignore[method-assign]


def _loses_a_micro_batch(role: str) -> None:
    """A master that makes a version without its last micro-batch, once."""
    if role != "master":
        return
    from elastable.master.commits.push_protocol import SyncPushes

    plain_ready, plain_commit = SyncPushes.ready, SyncPushes.commit
    made = 0

    def ready(self: SyncPushes) -> list[Ticket] | None:
        tickets = plain_ready(self)
        return tickets[:-1] if tickets is not None and made == 4 else tickets

    def commit(self: SyncPushes) -> bool:
        nonlocal made
        made += 1
        return plain_commit(self)

    SyncPushes.commit = commit  # type: ignore[method-assign]
    SyncPushes.ready = ready  # type: ignore[method-assign]


def _old_checkpoint(role: str) -> None:
    """A master that goes on from an older checkpoint than the newest: the numbers are right, versions are lost."""
    if role != "master":
        return
    from elastable.jobs import prepare

    plain: Callable[[str | Path], str | None] = prepare.newest_checkpoint  # type: ignore[attr-defined]

    def oldest(place: str | Path) -> str | None:
        newest = plain(place)
        return newest and str(min(Path(place).glob("ckpt-*")))

    prepare.newest_checkpoint = oldest  # type: ignore[attr-defined]


def _forgets_an_entry(role: str) -> None:
    """A master that takes over and replays the log without the rows of its commits."""
    if role != "master" or os.environ["CHAOS_LIFE"] == "1":
        return
    from elastable.embedding_store.engine import ReplayedTables

    plain = ReplayedTables._commit

    def commit(self: ReplayedTables, images: CommitImages, version: int) -> None:
        plain(self, replace(images, tables=[]), version)

    ReplayedTables._commit = commit  # type: ignore[assignment]


def _forgets_a_shard(role: str) -> None:
    """A recovery that takes a version back from a shard's log, and leaves its rows as the dead master left them."""
    if role != "master":
        return
    from elastable.embedding_store.engine import MemoryStore

    plain = MemoryStore.recover

    def recover(self: MemoryStore, version: int | None = None) -> int:
        if version is None or version != self.version() - 1:
            return plain(self, version)
        blocks = {name: list(self.scan(name)) for name in self.specs()}
        rows = plain(self, version)
        for name, of_table in blocks.items():
            self.put(name, of_table)
        return rows

    MemoryStore.recover = recover  # type: ignore[method-assign]


def _forgets_a_replay_epoch(role: str) -> None:
    """A master that takes over and rounds rows where it saves them, and no more where the schedule says so."""
    if role != "master" or os.environ["CHAOS_LIFE"] == "1":
        return
    from elastable.master.commits.committer import Committer

    def never_ending(plain: Callable[Concatenate[Committer, P], None]) -> Callable[Concatenate[Committer, P], None]:
        def begin(self: Committer, /, *arguments: P.args, **named: P.kwargs) -> None:
            plain(self, *arguments, **named)
            self._ends_replay_epoch = lambda version: False

        return begin

    Committer.__init__ = never_ending(Committer.__init__)  # type: ignore[assignment, method-assign]


def _keeps_nobody_out(role: str) -> None:
    """A master that takes over and does not keep the one before it from writing."""
    if role != "master":
        return
    from elastable.embedding_store.tiers.redis.redis_place import RedisPlace

    RedisPlace._end_others = lambda *_: None  # type: ignore[method-assign]
    RedisPlace.require = lambda *_: None  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[str], None]] = {
    "counts-twice": _counts_twice,
    "forgets-a-replay-epoch": _forgets_a_replay_epoch,
    "forgets-a-shard": _forgets_a_shard,
    "forgets-an-entry": _forgets_an_entry,
    "forgets-slots": _forgets_slots,
    "keeps-nobody-out": _keeps_nobody_out,
    "loses-a-micro-batch": _loses_a_micro_batch,
    "old-checkpoint": _old_checkpoint,
    "repeated-push": _repeated_push,
}
"""By name: puts an error into a process of that role. "repeated-push" is none: a right master counts it once."""


def _proof(kind: str, optimizer: str, *faults: Fault) -> Schedule:
    lazy = kind != "every"
    shape = Shape("light", optimizer, 4, lazy=lazy, replay_epoch=0 if lazy else 2)
    return Schedule(kind, 0, shape, 2, 2, 3, "grpc", faults, store=store_of(kind, 0))


PROOFS: dict[str, Schedule] = {
    "counts-twice": _proof("memory", "sgd"),
    "forgets-a-replay-epoch": _proof("every", "adam", Fault("version", 9, "kill", "master", 0.1)),
    "forgets-a-shard": _proof("shards", "adam", Fault("half", 10, "kill", "master", 0.1)),
    "forgets-an-entry": _proof("redis", "adam", Fault("version", 9, "kill", "master", 0.1)),
    "forgets-slots": _proof("memory", "adam", Fault("version", 9, "kill", "master", 0.1)),
    "loses-a-micro-batch": _proof("memory", "adagrad"),
    "old-checkpoint": _proof("memory", "sgd", Fault("version", 9, "kill", "master", 0.1)),
    "repeated-push": _proof("memory", "adagrad", Fault("computed", 30, "cut", "worker-master", 0.1)),
}
"""A schedule for each, in which the error shows. "keeps-nobody-out" has none: it shows only where the first master
happens to wake up between two commits of the second."""
