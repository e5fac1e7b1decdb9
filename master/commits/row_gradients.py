"""The rows' part of a version's gradient: held here, or by store servers that workers pushed it to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import FutureVersion, StoreBroken
from elastable.embedding_store.shards.exact_squares import exact_squares, square_of
from elastable.embedding_store.shards.pushed_sums import clipped_update
from elastable.embedding_store.shards.row_pushes import (
    Committed,
    Measured,
    PushedCommit,
    RowSums,
    ShardStore,
    TableClip,
)
from elastable.embedding_store.support.retry import retry
from elastable.master.commits.commitment import DONE, Commitment, begin_rows, commit_rows

__all__ = ["HeldRows", "PushedRows", "PushesLost", "RowGradients", "RowStep"]


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
    frozen: tuple[str, ...] = ()
    time: float | None = None
    record: bytes | None = None


class RowGradients(Protocol):
    """The summed gradients of all tables of one version.

    Attributes:
        updates: Table name -> gradient, of those that are held here.
    """

    updates: Mapping[str, TableUpdate]

    @property
    def changed(self) -> Iterable[str]:
        """Tables that had a gradient, once it is committed."""

    def tables(self) -> Iterable[str]:
        """Those that have a gradient, or may have one."""

    def finite(self) -> bool:
        """Whether all values are finite. Raises `PushesLost`."""

    def squares(self) -> dict[str, float]:
        """Table name -> the sum of the squares of its gradient, rounded once. Raises `PushesLost`."""

    def clip(self, clips: Mapping[str, TableClip]) -> None:
        """Has the gradients clipped."""

    def drop(self) -> None:
        """Leaves the gradients out: they overflowed."""

    def commit(self, step: RowStep, deadline_s: float) -> None:
        """Commits, and tries the same commit again while the store fails, for `deadline_s` seconds.

        Raises:
            PushesLost: nothing is committed.
            StoreFailed, Unavailable: the last failure before the deadline.
            StoreBroken: the store is at an earlier version than was committed to it.
        """

    def begin_commit(self, step: RowStep, deadline_s: float) -> Commitment:
        """As `commit`, but the store may still be logging the version (`EmbeddingStore.begin_commit`).

        Raises:
            As `commit`.
        """


class HeldRows:
    """Gradients that are held here."""

    def __init__(self, store: EmbeddingStore, updates: Mapping[str, TableUpdate]) -> None:
        self._store = store
        self.updates = updates

    @property
    def changed(self) -> Iterable[str]:
        return self.updates

    def tables(self) -> Iterable[str]:
        return self.updates

    def finite(self) -> bool:
        return all(bool(np.isfinite(update.gradients).all()) for update in self.updates.values())

    def squares(self) -> dict[str, float]:
        return {table: _rounded(exact_squares(update.gradients)) for table, update in self.updates.items()}

    def clip(self, clips: Mapping[str, TableClip]) -> None:
        self.updates = {
            table: clipped_update(update, clips[table]) if table in clips else update
            for table, update in self.updates.items()
        }

    def drop(self) -> None:
        self.updates = {}

    def commit(self, step: RowStep, deadline_s: float) -> None:
        commit_rows(self._store, self._commit(step), deadline_s)

    def begin_commit(self, step: RowStep, deadline_s: float) -> Commitment:
        return begin_rows(self._store, self._commit(step), deadline_s)

    def _commit(self, step: RowStep) -> Commit:
        return Commit(
            step.version,
            self.updates,
            step.step,
            step.rates,
            step.record,
            step.ends_chapter,
            step.frozen,
            step.time,
        )


class PushedRows:
    """Gradients that lie at store servers.

    Args:
        store: The servers.
        sums: What they sum.
        tables: That they hold.
        deadline_s: How long measuring is tried again while a server is away.
    """

    def __init__(self, store: ShardStore, sums: RowSums, tables: Sequence[str], deadline_s: float) -> None:
        self._store = store
        self._tables = tables
        self._sums = sums
        self._deadline_s = deadline_s
        self._known: Measured | None = None
        self._clips: Mapping[str, TableClip] = {}
        self._dropped = False
        self.updates: Mapping[str, TableUpdate] = {}
        self.changed: Iterable[str] = ()

    def tables(self) -> Iterable[str]:
        return self._tables

    def finite(self) -> bool:
        return not self._measured().not_finite

    def squares(self) -> dict[str, float]:
        measured = self._measured()
        squares = {table: square_of(square) for table, square in measured.squares.items()}
        return {**squares, **dict.fromkeys(measured.not_finite, math.inf)}

    def clip(self, clips: Mapping[str, TableClip]) -> None:
        self._clips = clips

    def drop(self) -> None:
        self._dropped = True

    def commit(self, step: RowStep, deadline_s: float) -> None:
        commit = PushedCommit(
            self._sums, step.step, step.rates, self._clips, step.record, step.ends_chapter, self._dropped, step.time
        )

        def attempt() -> Committed:
            try:
                return self._store.commit_pushed(commit)
            except FutureVersion as error:
                raise StoreBroken(f"the store has lost versions that were committed to it: {error}") from error

        made = retry(attempt, f"commit of version {step.version}", deadline_s)
        if made.missing:
            raise PushesLost(made.missing)
        self.changed = made.tables

    def begin_commit(self, step: RowStep, deadline_s: float) -> Commitment:
        self.commit(step, deadline_s)
        return DONE

    def _measured(self) -> Measured:
        if self._known is None:
            self._known = retry(lambda: self._store.measure(self._sums), "measuring gradients", self._deadline_s)
        if self._known.missing:
            raise PushesLost(self._known.missing)
        return self._known


def _rounded(square: int | None) -> float:
    return math.inf if square is None else square_of(square)
