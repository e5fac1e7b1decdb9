"""Commits to several stores: staged on all of them, then applied on all of them, or repaired by repeating them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from elastable.embedding_store.composite.partitions import Part, Partition
from elastable.embedding_store.composite.store_group import StoreGroup
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ShardAway, ShardLost, StoreBroken, StoreFailed, Unavailable
from elastable.embedding_store.measures import CLOCK
from elastable.embedding_store.tables.checks import require_numbers, require_update

RECORD_STORE = 0  # keeps the record of each commit for all stores

_FEW_VALUES = 1 << 13  # stores in memory apply fewer before a thread has started

_Share = list[tuple[Partition, Part, TableUpdate, Float32 | None]]
"""One store's part of every table's update, and the squares of whole rows."""


class UnfinishedCommit(NamedTuple):
    """A commit that only some stores may have applied; no other one is accepted until all of them have."""

    version: int
    digest: bytes  # of everything in it but its time
    time: float | None  # which it keeps when it is repeated


class CommitCoordinator:
    """Splits commits over stores. Not thread-safe: one commit at a time.

    Args:
        group: The stores.
        repairs_unknown: Whether a commit may complete one that another process began. Nobody can check that it is the
            same commit.
    """

    def __init__(self, group: StoreGroup[EmbeddingStore], repairs_unknown: bool) -> None:
        self._group, self._names = group, group.splits.stores
        self._repairs_unknown = repairs_unknown
        self._unfinished: UnfinishedCommit | None = None

    def forget(self) -> None:
        """All stores are at one version again."""
        self._unfinished = None

    def stage(self, commit: Commit, tables: Sequence[Partition], versions: Mapping[int, int]) -> Callable[[], None]:
        """Stages a commit on every store that does not have it yet; see `EmbeddingStore.stage`.

        Args:
            commit: Updates of whole tables.
            tables: The tables that are updated, in the commit's order.
            versions: The current version of every store.

        Raises:
            StoreFailed: the stores are at different versions, and this commit does not repair that.
        """
        require_numbers(commit)
        behind = self._behind(commit, versions)
        commit = replace(commit, time=self._time_of(commit))  # one for all stores, also where it is repeated
        shares: dict[int, _Share] = {store: [] for store in versions}
        for table, given in zip(tables, commit.updates.values(), strict=True):
            update = require_update(table.spec, given)
            squares = table.row_squares(update)
            for part in table.parts(update.ids):
                shares[part.shard].append((table, part, update, squares))
        together = (
            not self._group.in_memory or sum(update.gradients.size for update in commit.updates.values()) > _FEW_VALUES
        )
        staged = self._group.run(
            {store: partial(self._stage, store, commit, shares[store]) for store in behind}, together
        )
        # Stores without rows follow: if all that have rows fail, nothing has changed anywhere.
        touched = [store for store in behind if any(len(part.ids) for _, part, _, _ in shares[store])]
        untouched = [store for store in behind if store not in touched]
        waves = [{store: staged[store] for store in wave} for wave in (touched, untouched) if wave]
        return partial(self._finish, commit, waves, together)

    def _time_of(self, commit: Commit) -> float:
        if self._unfinished is not None and self._unfinished.time is not None:
            return self._unfinished.time
        return CLOCK.now() if commit.time is None else commit.time

    def _behind(self, commit: Commit, versions: Mapping[int, int]) -> list[int]:
        """The stores that do not have the commit yet."""
        oldest = min(versions.values())
        if self._unfinished is not None:
            if (commit.version, _digest(commit)) != self._unfinished[:2]:
                raise StoreFailed(
                    f"the commit of version {self._unfinished.version} broke off: repeat that very commit, with the "
                    "same gradients, before another one, or restore rows and reset the version"
                )
            if oldest == max(versions.values()) == commit.version:
                return []  # only answers were lost
        refuse_other_version(oldest, commit.version - 1)
        newest = commit.version if self._repairs_unknown or self._unfinished is not None else commit.version - 1
        behind = [store for store, version in sorted(versions.items()) if version < commit.version]
        for store, version in sorted(versions.items()):
            if version > newest:
                raise StoreFailed(
                    f"{self._names[store]} is at version {version} and {self._names[behind[0]]} at "
                    f"{oldest}, by a commit that is not known here: recover the store, or restore rows and reset the "
                    "version, before a commit"
                )
        return behind

    def _stage(self, store: int, commit: Commit, share: _Share) -> Callable[[], None]:
        updates = {table.spec.name: table.update(part, update, squares) for table, part, update, squares in share}
        # Learning rates of all its tables: rows of a table without an update may follow the step too.
        rates = {table: rate for table, rate in commit.learning_rates.items() if self._group.splits.owns(store, table)}
        frozen = tuple(table for table in commit.frozen if self._group.splits.owns(store, table))
        record = commit.record if store == RECORD_STORE else None
        part = replace(commit, updates=updates, learning_rates=rates, frozen=frozen, record=record)
        return self._group.sources[store].stage(part)

    def _finish(self, commit: Commit, waves: Sequence[Mapping[int, Callable[[], None]]], together: bool) -> None:
        for wave in waves:
            done, errors = self._group.outcomes(wave, together)
            if errors:
                self._break_off(commit, errors, applied=bool(done) or wave is not waves[0])
        self._unfinished = None

    def _break_off(self, commit: Commit, errors: Mapping[int, Exception], applied: bool) -> None:
        changed = any(isinstance(error, (StoreFailed, Unavailable)) for error in errors.values())
        if not applied and not changed and self._unfinished is None:
            self._group.raise_first(errors)
        self._unfinished = UnfinishedCommit(commit.version, _digest(commit), commit.time)
        failed = {self._names[store]: error for store, error in sorted(errors.items())}
        kind: type[StoreFailed] = StoreFailed
        if any(isinstance(error, StoreBroken) for error in errors.values()):
            kind = ShardLost
        elif all(isinstance(error, Unavailable) for error in errors.values()):
            kind = ShardAway
        raise kind(
            f"the commit of version {commit.version} did not end on {', '.join(failed)}, and other stores may have "
            "applied it; repeat the same commit to finish it: "
            + "; ".join(f"{name}: {error}" for name, error in failed.items())
        ) from next(iter(failed.values()))


def recovery_version(versions: Mapping[int, int], version: int | None, names: Sequence[str]) -> int:
    """The version that all stores can go back to.

    Args:
        versions: The current version of every store.
        version: The one that is asked for; None: the newest that all stores have reached.
        names: What errors call each store.

    Raises:
        ShardLost: stores are further apart than a commit that broke off leaves them.
        StaleVersion, FutureVersion: a store is neither at that version nor one later.
    """
    newest = max(versions.values())
    for store, current in sorted(versions.items()):
        if current < newest - 1:
            raise ShardLost(f"{names[store]} is lost: it is at version {current}, and others at {newest}")
    target = min(versions.values()) if version is None else version
    for current in versions.values():
        if current != target + 1:
            refuse_other_version(current, target)
    return target


def _digest(commit: Commit) -> bytes:
    fields = (
        commit.version,
        commit.step,
        sorted(commit.learning_rates.items()),
        commit.ends_replay_epoch,
        commit.frozen,
    )
    digest = hashlib.blake2b(repr(fields).encode())
    for name, update in commit.updates.items():
        digest.update(f"{name} {update.gradients.shape}".encode())
        for part in (update.ids, update.gradients, update.row_squares):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
    if commit.record is not None:
        digest.update(commit.record)
    return digest.digest()
