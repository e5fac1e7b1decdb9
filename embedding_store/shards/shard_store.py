"""What a master and workers ask of store servers: to keep pushes, to sum them, and to commit them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.shards.row_pushes import (
    Committed,
    Measured,
    PushedCommit,
    RowOffers,
    RowPush,
    RowPushOutcome,
    RowSums,
)
from elastable.embedding_store.shards.row_saving import ServedRows, TakenChanges
from elastable.embedding_store.shards.server_status import ShardStatus

__all__ = ["ShardServer", "ShardStore"]


class ShardStore(EmbeddingStore, ServedRows, ABC):
    """A store that workers push row gradients to, and whose owner, a job's master, says when they are committed.

    A version counts once every shard of a job has it. Until the next one begins a shard can go back from it
    (`recover`), and keeps the pushes that it was made of.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """`host:port` of the server; of several servers with commas between."""

    @abstractmethod
    def begin_job(self, job: str, may_overflow: bool) -> None:
        """Takes pushes of this job from now on.

        Args:
            job: Its id.
            may_overflow: Whether pushes may hold NaN or Inf.

        Raises:
            TakenOver: another process has become the owner.
        """

    @abstractmethod
    def push_rows(self, push: RowPush) -> RowPushOutcome:
        """Keeps a push until its version is committed, or its sender sends another. Repeating it is harmless.

        Raises:
            NotReady: there is no room for it now, or no job has claimed the server since it started.
            FutureVersion: the version that it was computed on has not been committed here.
            JobFailed: another job owns the server.
            BadGradient, BadIds, IdOutOfRange, TableNotFound, NotFinite: it cannot be used; nothing is kept of it.
        """

    @abstractmethod
    def shard_status(self) -> ShardStatus:
        """What the server says of itself, in a single attempt of a few seconds.

        Raises:
            ElastableError: it does not answer.
        """

    @abstractmethod
    def measure(self, sums: RowSums) -> Measured:
        """Sums the gradient of a version, and measures it. Changes nothing.

        Raises:
            StaleVersion, FutureVersion: the store is at another version than `sums.version`.
        """

    @abstractmethod
    def commit_pushed(self, commit: PushedCommit) -> Committed:
        """Makes a version of pushes; one that was made before is not made again.

        Raises:
            StaleVersion, FutureVersion: the store is neither at `sums.version` nor at the version after it.
            StoreFailed, Unavailable: it is not committed; the same commit may be made again.
        """

    @abstractmethod
    def take_changes(self, mark: bytes, base: bytes) -> TakenChanges:
        """What changed since the checkpoint of mark `base`, for the one of mark `mark`: 16 bytes each.

        Call it between two commits. Rows are written down with the mark by `save_rows`; the changes are kept until the
        next call says, as its `base`, whether that succeeded.
        """


class ShardServer(ShardStore):
    """One of the store servers of a job."""

    @abstractmethod
    def take_position(self, number: int, servers: int) -> None:
        """From now on claims say which of how many servers this is; one whose tables say otherwise is not claimed.

        Args:
            number: Counted from 0.
            servers: How many there are.
        """

    @abstractmethod
    def follow(self, find: Callable[[], str | None]) -> None:
        """From now on the server is looked for elsewhere where it is not reached.

        Args:
            find: Gives its `host:port` as it is now, within a few seconds; None, or an `ElastableError`: nobody knows.
        """

    @abstractmethod
    def offer_rows(self, commit: PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]) -> RowOffers:
        """What this server has of tables that share a budget of rows, for whoever decides which go; changes nothing.

        Args:
            commit: That is to be made; without `cuts`.
            most: How many versions are listed, of each table.
            ids: Table name -> (version, n): the n greatest ids of rows that were last touched at that version.

        Raises:
            StaleVersion, FutureVersion: as `measure`.
        """
