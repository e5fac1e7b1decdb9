"""Commits to several stores: staged everywhere, then made everywhere, or repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elastable.embedding_store.composite.partitions.partition import Part, Partition
from elastable.embedding_store.composite.partitions.shard_calls import ShardCalls
from elastable.embedding_store.composite.unfinished_commit import UnfinishedCommit
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.refusals import refuse_other_version
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ShardAway, ShardLost, StoreBroken, StoreFailed, Unavailable
from elastable.embedding_store.rows.checks import require_update
from elastable.embedding_store.rows.commit_checks import require_numbers

__all__ = ["RECORD_SHARD", "ShardCommits", "require_common_version"]

RECORD_SHARD = 0  # keeps the records of all

_FEW_VALUES = 1 << 13  # which stores in memory have updated before a thread has started

_Share = list[tuple[Partition, Part, TableUpdate, Float32 | None]]
"""A shard's part of every table's update, and the squares of whole rows."""


class ShardCommits:
    """Splits commits over shards. Not thread-safe: one commit after the other."""

    def __init__(self, stores: Sequence[EmbeddingStore], calls: ShardCalls, in_memory: bool) -> None:
        """`in_memory`: whether the stores answer faster than a thread starts, where there is little to do."""
        self._stores = stores
        self._calls = calls
        self._in_memory = in_memory
        self._broken_off: UnfinishedCommit | None = None

    def forget(self) -> None:
        """The shards are of one version again."""
        self._broken_off = None

    def stage(self, commit: Commit, tables: Sequence[Partition], versions: Mapping[int, int]) -> Callable[[], None]:
        """As `EmbeddingStore.stage`.

        Args:
            commit: On whole tables.
            tables: That are updated, in the commit's order.
            versions: That stand on the shards.

        Raises:
            StoreFailed: shards are apart, and this commit is not the one that joins them.
        """
        require_numbers(commit)
        behind = self._behind(commit, versions)
        shares: dict[int, _Share] = {shard: [] for shard in range(len(self._stores))}
        for table, given in zip(tables, commit.updates.values(), strict=True):
            update = require_update(table.spec, given)
            squares = table.row_squares(update)
            for part in table.parts(update.ids):
                shares[part.shard].append((table, part, update, squares))
        together = not self._in_memory or sum(update.gradients.size for update in commit.updates.values()) > _FEW_VALUES
        stages = {shard: partial(self._stage, shard, commit, shares[shard]) for shard in behind}
        staged = self._calls.run(stages, together)
        # Those without rows last: should all that have some fail, the store is as it was.
        touched = [shard for shard in behind if any(len(part.ids) for _, part, _, _ in shares[shard])]
        untouched = [shard for shard in behind if shard not in touched]
        waves = [{shard: staged[shard] for shard in wave} for wave in (touched, untouched) if wave]
        return partial(self._finish, commit, waves, together)

    def _behind(self, commit: Commit, versions: Mapping[int, int]) -> list[int]:
        """The shards that do not have the commit yet."""
        broken, oldest, newest = self._broken_off, min(versions.values()), max(versions.values())
        if broken is not None:
            broken.require_same(commit)
        if oldest == newest == commit.version and broken is not None:
            return []  # only answers were lost
        refuse_other_version(oldest, commit.version - 1)
        ahead = sorted(shard for shard, version in versions.items() if version > commit.version)
        if ahead:
            raise StoreFailed(
                f"shard {ahead[0]} stands at version {versions[ahead[0]]} while version {commit.version} is "
                "committed: who else writes?"
            )
        return sorted(shard for shard, version in versions.items() if version < commit.version)

    def _stage(self, shard: int, commit: Commit, share: _Share) -> Callable[[], None]:
        updates = {table.spec.name: table.update(part, update, squares) for table, part, update, squares in share}
        # Rates of all tables: rows of those without an update may follow the step, too.
        record = commit.record if shard == RECORD_SHARD else None
        return self._stores[shard].stage(replace(commit, updates=updates, record=record))

    def _finish(self, commit: Commit, waves: Sequence[Mapping[int, Callable[[], None]]], together: bool) -> None:
        for wave in waves:
            done, errors = self._calls.outcomes(wave, together)
            if errors:
                self._break_off(commit, errors, nothing_stands=not done and wave is waves[0])
        self._broken_off = None

    def _break_off(self, commit: Commit, errors: Mapping[int, Exception], nothing_stands: bool) -> None:
        unchanged = not any(isinstance(error, (StoreFailed, Unavailable)) for error in errors.values())
        if nothing_stands and unchanged and self._broken_off is None:
            self._calls.raise_first(errors)
        self._broken_off = UnfinishedCommit.of(commit)
        failed = sorted(errors)
        kind: type[StoreFailed] = StoreFailed
        if any(isinstance(error, StoreBroken) for error in errors.values()):
            kind = ShardLost
        elif all(isinstance(error, Unavailable) for error in errors.values()):
            kind = ShardAway
        raise kind(
            f"the commit of version {commit.version} did not end on shard {', '.join(map(str, failed))} of "
            f"{len(self._stores)}, and may stand on others; repeat the same commit to finish it: "
            + "; ".join(f"shard {shard}: {errors[shard]}" for shard in failed)
        ) from errors[failed[0]]


def require_common_version(target: int, versions: Iterable[int]) -> None:
    """Raises unless stores that are at `versions` can all go to `target`: each is there, or one version beyond."""
    for version in versions:
        if version != target + 1:
            refuse_other_version(version, target)
