"""The rows' part of a version's gradient, wherever its shards are: measured, clipped and committed exactly once."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

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
from elastable.embedding_store.shards.version_sums import Pushes, VersionSums, is_made, square_of
from elastable.embedding_store.support.futures import at_once
from elastable.embedding_store.support.retry import retry


class PushesLost(Exception):
    """A store server was started again, and lacks pushes of the version in work; nothing is committed.

    Attributes:
        numbers: What names them among those of the version, as in `SumTerm`.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"pushes {list(numbers)} are lost")
        self.numbers = tuple(numbers)


class RowGradients:
    """The summed gradients of all tables of one version.

    Args:
        deadline_s: How long measuring is tried again while a server is away.

    Attributes:
        sums: What is summed, by a shard.
        tables: Those that have a gradient, or may have one.
        clips, dropped: Of the commit: how tables are clipped, and whether all is left out because it overflowed.
        changed: Tables that had a gradient, once it is committed.
    """

    def __init__(
        self, shard: "ShardStore | EmbeddedShard", sums: RowSums, tables: Sequence[str], deadline_s: float
    ) -> None:
        self._shard, self.sums = shard, sums
        self._deadline_s = deadline_s
        self._known: Measured | None = None
        self.clips: Mapping[str, TableClip] = {}
        self.dropped = False
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

    def commit(
        self,
        commit: PushedCommit,
        deadline_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Commits, and tries the same commit again while the store fails.

        Args:
            commit: Of `sums`; without `clips` and `dropped`.
            deadline_s: No new attempt is made after that many seconds.
            now: Monotonic clock, in seconds.
            sleep: Waits that many seconds.

        Raises:
            PushesLost: nothing is committed.
            StoreFailed, Unavailable: the last failure before the deadline.
            StoreBroken: the store is at an earlier version than was committed to it.
        """
        commit = replace(commit, clips=self.clips, dropped=self.dropped)

        def attempt() -> Committed:
            with refusing_an_older_store():
                return self._shard.commit_pushed(commit)

        made = retry(attempt, f"commit of version {commit.version}", deadline_s, now=now, sleep=sleep)
        if made.missing:
            raise PushesLost(made.missing)
        self.changed = made.tables

    def _measured(self) -> Measured:
        if self._known is None:
            self._known = retry(lambda: self._shard.measure(self.sums), "measuring gradients", self._deadline_s)
        if self._known.missing:
            raise PushesLost(self._known.missing)
        return self._known


class EmbeddedShard:
    """The one shard of a job whose master holds the store. Used by one thread at a time, `unlogged` by any.

    Args:
        ahead: Whether `commit_pushed` may return while a store that keeps records still logs the version.

    Attributes:
        updates: Table name -> the gradient that was committed last, clipped.
    """

    def __init__(self, store: EmbeddingStore, ahead: bool = False) -> None:
        self._store = store
        self._ahead = ahead and store.keeps_records
        self._sums = VersionSums(lambda sums: self._pushes)
        self._forget()

    def _forget(self) -> None:
        self._sums.forget()
        self._pushes: Pushes = {}
        self._pushed: PushedCommit | None = None
        self._commit = Commit(0, {}, 0, {})
        self._begun: Future[None] = at_once(None)
        self.updates: Mapping[str, TableUpdate] = {}

    def take(self, sums: RowSums, pushes: Pushes) -> None:
        """Sums what the next version is made of."""
        self._forget()  # before the sums are made, which then take the memory of those before
        self._pushes = pushes
        self._sums.summed(sums)

    def measure(self, sums: RowSums) -> Measured:
        """As `ShardStore.measure`."""
        return self._sums.measured(sums)

    def commit_pushed(self, commit: PushedCommit) -> Committed:
        """As `ShardStore.commit_pushed`. The same object again is the same commit, made exactly once."""
        if commit is not self._pushed:
            self._pushed, self._commit = commit, self._sums.to_commit(commit)
            self._begun = at_once(None)  # as where the first attempt fails, and another one commits
            if self._ahead:
                self._begun = self._store.begin_commit(self._commit)
            else:
                self._store.commit(self._commit)
        else:
            self._commit_again()
        self.updates = self._commit.updates
        return Committed(tables=tuple(self.updates))

    @property
    def unlogged(self) -> int | None:
        """The version that was committed last, while the store has not logged it. Does not wait, and asks no server."""
        begun = self._begun
        return None if begun.done() and begun.exception() is None else self._commit.version

    def logging_over(self) -> bool:
        """Whether the store has logged the version that was committed last, or has failed to. Does not wait."""
        return self._begun.done()

    def wait_logged(self, deadline_s: float) -> None:
        """Waits until the store has logged it; commits again while the store fails, and raises the last failure."""
        first = [self._begun]

        def attempt() -> None:
            with refusing_an_older_store():
                if first:
                    first.pop().result()
                else:
                    self._commit_again()

        retry(attempt, f"commit of version {self._commit.version}", deadline_s)
        self._begun = at_once(None)

    def _commit_again(self) -> None:
        if not is_made(self._store, self._commit):
            self._store.commit(self._commit)


@contextmanager
def refusing_an_older_store() -> Iterator[None]:
    """Around a commit: raises `StoreBroken` where the store is at an earlier version than was committed to it."""
    try:
        yield
    except FutureVersion as error:
        raise StoreBroken(f"the store has lost versions that were committed to it: {error}") from error
