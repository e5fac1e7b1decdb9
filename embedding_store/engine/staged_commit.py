"""A commit in memory: everything that can fail, then the rows of all tables, and what a log keeps of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.engine.membership import require_cuts
from elastable.embedding_store.engine.memory_table import MemoryTable, StagedUpdate
from elastable.embedding_store.log.changes import CommitImages
from elastable.embedding_store.measures import CLOCK
from elastable.embedding_store.native.range_pool import RangePool

_PIECE = 1 << 13  # rows that a thread updates in one go: fewer cost more to hand out than to do


@dataclass(frozen=True, slots=True)
class StagedCommit:
    """A commit that cannot fail any more.

    Attributes:
        commit: What it is.
        tables: Of the store, by name.
        updates: Tables with what it does to each.
        time: When it is made; None: no table asks for it.
    """

    commit: Commit
    tables: Mapping[str, MemoryTable]
    updates: list[tuple[MemoryTable, StagedUpdate]]
    time: float | None

    def apply(self, pool: RangePool) -> None:
        """Changes the rows of all tables, in pieces and on several threads."""
        commit, updates = self.commit, self.updates
        for table, update in updates:
            table.claim(update, pool, commit.version)
        ends, total = [], 0
        for _, update in updates:
            total += len(update.batch.ids)
            ends.append(total)

        def span(first: int, last: int) -> None:
            begin = 0
            for (table, update), end in zip(updates, ends, strict=True):
                start, stop = max(first, begin), min(last, end)
                if start < stop:
                    with np.errstate(all="ignore"):  # as Keras does; an overflow must not end a commit half way
                        table.apply(update, start - begin, stop - begin)
                begin = end

        if total <= _PIECE or pool.threads == 1:
            span(0, total)
        else:
            pool.share(span, total, _PIECE)
        for name, table in self.tables.items():
            if name in commit.frozen:
                table.stay(commit.ends_replay_epoch)
                continue
            if table.replay is not None:
                table.follow(commit.step, _rate(table, commit), commit.ends_replay_epoch)
            table.evict(commit.version, self.time, commit.cuts.get(name))

    def images(self, pool: RangePool) -> CommitImages:
        """What the commit, which was applied, has made of the tables; valid until the next one."""
        commit, updates = self.commit, dict(self.updates)
        rates, images = {}, []
        for name, table in self.tables.items():
            if name in commit.frozen:
                continue
            if table.replay is not None:
                rates[name] = _rate(table, commit)
            update = updates.get(table)
            if update is not None:
                images.append(table.images(update.batch, update.sighted, pool))
            elif table.removed:
                images.append(table.images(None, None, pool))
        return CommitImages(
            commit.step, images, rates, commit.frozen, commit.ends_replay_epoch, commit.record, self.time
        )


def stage_commit(
    commit: Commit,
    tables: Mapping[str, MemoryTable],
    updates: Sequence[tuple[MemoryTable, TableUpdate]],
    bring: Callable[[Sequence[tuple[MemoryTable, Int64]]], None] | None = None,
) -> StagedCommit:
    """Does everything about a commit that can fail; changes no row.

    Args:
        commit: Whose version and numbers were checked.
        tables: Of the store, by name.
        updates: Those of the commit, checked, and their tables.
        bring: Reads cold rows of these ids, int64 `[n]`, of all tables at once.

    Raises:
        MemoryError: no room for new rows.
        BadInput: what goes for budgets of rows that tables share with others is not said, or of others.
        ElastableError: rows cannot be read, or steps not be taken.
        Exception: whatever an optimizer that is not fused raises.
    """
    evicting = False
    for table in tables.values():
        if table.replay is not None:
            table.replay.steps.prepare(commit.step, _rate(table, commit))
            if table.spec.name not in commit.frozen:
                table.make_ready_to_follow()
        evicting = evicting or table.spec.eviction is not None
    if evicting or commit.cuts:
        require_cuts((table.spec for table in tables.values()), commit)
    if bring is not None:
        bring([(table, update.ids) for table, update in updates])
    staged = []
    for table, update in updates:
        staged.append((table, table.stage(update, commit.step, _rate(table, commit))))
    return StagedCommit(commit, tables, staged, time_of(commit, tables) if evicting else None)


def time_of(commit: Commit, tables: Mapping[str, MemoryTable]) -> float | None:
    """The time of a commit, decided now where it says none; None: no table asks for it."""
    if not any(table.spec.timed for table in tables.values()):
        return None
    return float(CLOCK.now() if commit.time is None else commit.time)


def _rate(table: MemoryTable, commit: Commit) -> float:
    return commit.learning_rates.get(table.spec.name, table.optimizer.default_learning_rate)
