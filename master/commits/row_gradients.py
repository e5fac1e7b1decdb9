"""The rows' part of a version's gradient, wherever its shards are: measured, clipped and committed exactly once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastable.embedding_store.shards import Committed, Measured, PushedCommit, RowSums, TableClip, square_of
from elastable.embedding_store.support.retry import retry
from elastable.master.commits.embedded_shard import refusing_an_older_store

__all__ = ["PushesLost", "RowGradients", "RowShard", "RowStep"]


class PushesLost(Exception):
    """A store server was started again, and lacks pushes of the version in work; nothing is committed.

    Attributes:
        numbers: What names them among those of the version, as in `SumTerm`.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"pushes {list(numbers)} are lost")
        self.numbers = tuple(numbers)


@dataclass(frozen=True, slots=True)
class RowStep:
    """What belongs to a commit besides gradients; see `elastable.embedding_store.contract.row_data.Commit`."""

    version: int
    step: int
    rates: Mapping[str, float]
    ends_chapter: bool = False
    time: float | None = None
    record: bytes | None = None


class RowShard(Protocol):
    """Whoever holds a job's rows and the pushes of the next version: store servers, or an `EmbeddedShard`."""

    def measure(self, sums: RowSums) -> Measured:
        """As `ShardStore.measure`."""

    def commit_pushed(self, commit: PushedCommit) -> Committed:
        """As `ShardStore.commit_pushed`."""


class RowGradients:
    """The summed gradients of all tables of one version.

    Args:
        shard: Who sums them.
        sums: What is summed.
        tables: Those that have a gradient, or may have one.
        deadline_s: How long measuring is tried again while a server is away.

    Attributes:
        tables: As given.
        changed: Tables that had a gradient, once it is committed.
    """

    def __init__(self, shard: RowShard, sums: RowSums, tables: Sequence[str], deadline_s: float) -> None:
        self._shard, self._sums = shard, sums
        self._deadline_s = deadline_s
        self._known: Measured | None = None
        self._clips: Mapping[str, TableClip] = {}
        self._dropped = False
        self.tables = tables
        self.changed: Iterable[str] = ()

    def finite(self) -> bool:
        """Whether all values are finite. Raises `PushesLost`."""
        return not self._measured().not_finite

    def squares(self) -> dict[str, float]:
        """Table name -> the sum of the squares of its gradient, rounded once. Raises `PushesLost`."""
        measured = self._measured()
        squares = {table: square_of(square) for table, square in measured.squares.items()}
        return {**squares, **dict.fromkeys(measured.not_finite, math.inf)}

    def clip(self, clips: Mapping[str, TableClip]) -> None:
        """Has the gradients clipped."""
        self._clips = clips

    def drop(self) -> None:
        """Leaves the gradients out: they overflowed."""
        self._dropped = True

    def commit(
        self,
        step: RowStep,
        deadline_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Commits, and tries the same commit again while the store fails.

        Args:
            step: What else belongs to the commit.
            deadline_s: No new attempt is made after that many seconds.
            now: Monotonic clock, in seconds.
            sleep: Waits that many seconds.

        Raises:
            PushesLost: nothing is committed.
            StoreFailed, Unavailable: the last failure before the deadline.
            StoreBroken: the store is at an earlier version than was committed to it.
        """
        commit = PushedCommit(
            self._sums, step.step, step.rates, self._clips, step.record, step.ends_chapter, self._dropped, step.time
        )

        def attempt() -> Committed:
            with refusing_an_older_store():
                return self._shard.commit_pushed(commit)

        made = retry(attempt, f"commit of version {step.version}", deadline_s, now=now, sleep=sleep)
        if made.missing:
            raise PushesLost(made.missing)
        self.changed = made.tables

    def _measured(self) -> Measured:
        if self._known is None:
            self._known = retry(lambda: self._shard.measure(self._sums), "measuring gradients", self._deadline_s)
        if self._known.missing:
            raise PushesLost(self._known.missing)
        return self._known
