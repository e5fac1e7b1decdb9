"""The rows' part of a version's gradient, wherever its shards are: measured, clipped and committed exactly once."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar, cast

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import FutureVersion, StoreBroken
from elastable.embedding_store.shards.server_contract import (
    Committed,
    Measured,
    PushedCommit,
    RowSums,
    ShardStore,
    TableClip,
)
from elastable.embedding_store.shards.version_sums import commit_of, is_made, measured, square_of
from elastable.embedding_store.support.futures import at_once
from elastable.embedding_store.support.retry import retry

Answer = TypeVar("Answer")


class PushesLost(Exception):
    """A store server was started again, and lacks pushes of the version in work; nothing is committed.

    Attributes:
        numbers: What names them among those of the version, as in `SumTerm`.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"pushes {list(numbers)} are lost")
        self.numbers = tuple(numbers)


class RowGradients:
    """The gradients of all tables of one version, which store servers keep and sum.

    Args:
        deadline_s: How long measuring and committing are tried again while a server is away.

    Attributes:
        sums: What is summed; without its terms where the master has summed them.
        tables: Those that have a gradient, or may have one.
        clips, dropped: Of the commit: how tables are clipped, and whether all is left out because it overflowed.
        changed: Tables that had a gradient, once it is committed.
        updates: Table name -> its gradient, clipped once it is committed; none where servers sum.
    """

    def __init__(self, store: EmbeddingStore, sums: RowSums, tables: Sequence[str], deadline_s: float) -> None:
        self._store, self.sums, self.tables = store, sums, tables
        self._deadline_s = deadline_s
        self._known: Measured | None = None
        self.clips: Mapping[str, TableClip] = {}
        self.dropped = False
        self.changed: Sequence[str] = ()
        self.updates: Mapping[str, TableUpdate] = {}
        self._pushed = PushedCommit(sums, 0, {})

    def finite(self) -> bool:
        """Whether all values are finite. Raises `PushesLost`."""
        return not self._measured().not_finite

    def squares(self) -> dict[str, float]:
        """Table name -> the sum of the squares of its gradient, rounded once. Raises `PushesLost`."""
        known = self._measured()
        squares = {table: square_of(square) for table, square in known.squares.items()}
        return {**squares, **dict.fromkeys(known.not_finite, math.inf)}

    def commit(
        self,
        commit: PushedCommit,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Commits, and tries the same commit again while the store fails.

        Args:
            commit: Of `sums`; without `clips` and `dropped`.
            now: Monotonic clock, in seconds.
            sleep: Waits that many seconds.

        Raises:
            PushesLost: nothing is committed.
            StoreFailed, Unavailable: the last failure before the deadline.
            StoreBroken: the store is at an earlier version than was committed to it.
        """
        self._pushed = replace(commit, clips=self.clips, dropped=self.dropped)
        made = self._until_made(self._commit, now, sleep)
        if made.missing:
            raise PushesLost(made.missing)
        self.changed = made.tables

    def _until_made(
        self,
        attempt: Callable[[], Answer],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Answer:
        what = f"commit of version {self.sums.version + 1}"
        try:
            return retry(attempt, what, self._deadline_s, now=now, sleep=sleep)
        except FutureVersion as error:
            raise StoreBroken(f"the store has lost versions that were committed to it: {error}") from error

    def _measured(self) -> Measured:
        if self._known is None:
            self._known = retry(self._measure, "measuring gradients", self._deadline_s)
        if self._known.missing:
            raise PushesLost(self._known.missing)
        return self._known

    def _measure(self) -> Measured:
        return cast(ShardStore, self._store).measure(self.sums)

    def _commit(self) -> Committed:
        return cast(ShardStore, self._store).commit_pushed(self._pushed)


class OwnRowGradients(RowGradients):
    """Those of a job whose master holds the store. Used by one thread at a time, `unlogged` by any.

    Args:
        updates: The sums, by table.
        ahead: Whether `commit` may return while the store still logs the version.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        sums: RowSums,
        tables: Sequence[str],
        deadline_s: float,
        updates: Mapping[str, TableUpdate],
        ahead: bool = False,
    ) -> None:
        super().__init__(store, sums, tables, deadline_s)
        self.updates, self._ahead = updates, ahead
        self._made: Commit | None = None
        self._logged: Future[None] = at_once(None)

    def _measure(self) -> Measured:
        return measured(self.updates)

    def _commit(self) -> Committed:
        if self._made is None:
            self._made = commit_of(self._pushed, {} if self.dropped else self.updates)
            self.updates = self._made.updates
            if self._ahead:
                self._logged = self._store.begin_commit(self._made)
            else:
                self._store.commit(self._made)
        elif not is_made(self._store, self._made):
            self._store.commit(self._made)
        return Committed(tables=tuple(self.updates))

    @property
    def unlogged(self) -> int | None:
        """The version, while the store has not logged it. Does not wait, and asks no server."""
        return None if self._logged.done() and self._logged.exception() is None else self.sums.version + 1

    def logging_over(self) -> bool:
        """Whether the store has logged the version, or has failed to. Does not wait."""
        return self._logged.done()

    def wait_logged(self) -> None:
        """Waits until the store has logged it; commits again while the store fails, and raises the last failure."""
        first = [self._logged]
        self._until_made(lambda: first.pop().result() if first else self._commit())
