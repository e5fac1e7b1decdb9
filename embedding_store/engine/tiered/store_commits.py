"""The part of a memory store that makes commits: everything that can fail, then the rows, then the log."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.engine.membership.shared_budgets import require_cuts
from elastable.embedding_store.engine.memory_table import MemoryTable, StagedUpdate
from elastable.embedding_store.engine.row_shares import share_rows
from elastable.embedding_store.engine.tiered.written_behind import WrittenBehind
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.measures.spans import carried
from elastable.embedding_store.rows.checks import require_numbers, require_update
from elastable.embedding_store.support.futures import at_once

__all__ = ["StoreCommits"]


@dataclass(frozen=True, slots=True)
class StagedCommit:
    """A commit that cannot fail any more.

    Attributes:
        updates: Tables with what it does to each.
        time: When it is made; None: no table asks for it.
    """

    updates: list[tuple[MemoryTable, StagedUpdate]]
    time: float | None


class StoreCommits(WrittenBehind):
    """What `MemoryStore` does when it commits."""

    _appender: ThreadPoolExecutor | None = None

    def commit(self, commit: Commit) -> None:
        self._make_way()
        with self._lock.writing():
            self._own()
            if not self._log_again(commit):
                self._finish(commit, self._timed_stage(commit))

    def begin_commit(self, commit: Commit) -> Future[None]:
        """As in `EmbeddingStore.begin_commit`: the store stays locked until a thread has logged the commit.

        Where nobody can read the version before, it is logged in the caller's thread.
        """
        if self._history is None or not self._history.keeps_entries:
            return super().begin_commit(commit)
        self._make_way()
        with ExitStack() as held:
            held.enter_context(self._lock.writing())
            self._own()
            if self._log_again(commit):
                return at_once(None)
            self._compute(commit, self._timed_stage(commit))
            if self._show_ahead(commit.version):
                return self._log_behind(commit, held.pop_all())
            self._log_noted(commit)
        return at_once(None)

    def stage(self, commit: Commit) -> Callable[[], None]:
        """The second half cannot fail, but for the lock."""
        self._make_way()
        with self._lock.writing():
            self._own()
            self._drop_unlogged()
            self._decide()
            staged = self._timed_stage(commit)
            before = self._changes

        def finish() -> None:
            with self._lock.writing():
                if self._log_again(commit):
                    return
                if self._changes != before:
                    raise StoreFailed(f"the memory store was changed while version {commit.version} was staged")
                self._finish(commit, staged)
                self._wait_for_decision()

        return finish

    def _timed_stage(self, commit: Commit) -> StagedCommit:
        with self._phases.timing("prepare"):
            return self._stage(commit)

    def _stage(self, commit: Commit) -> StagedCommit:
        """Everything about a commit that can fail; changes no row."""
        require_numbers(commit)
        refuse_other_version(self._version, commit.version - 1)
        require_cuts((table.spec for table in self._tables.values()), commit)
        tables = [self._table(name) for name in commit.updates]
        updates = [require_update(t.spec, u) for t, u in zip(tables, commit.updates.values(), strict=True)]
        for table in self._tables.values():
            if table.replay is not None:
                table.replay.steps.prepare(commit.step, self._rate(table, commit))
            if table.spec.name not in commit.frozen:
                table.make_ready_to_follow()
        self._bring(list(zip(tables, updates, strict=True)))
        staged = [
            (table, table.stage(update, commit.step, self._rate(table, commit)))
            for table, update in zip(tables, updates, strict=True)
        ]
        return StagedCommit(staged, self._time_of(commit))

    def _finish(self, commit: Commit, staged: StagedCommit) -> None:
        """The second half, of which only logging can fail: everything else that could was done by `_stage`."""
        self._compute(commit, staged)
        self._log_noted(commit)

    def _compute(self, commit: Commit, staged: StagedCommit) -> None:
        with self._whole_or_broken(), self._phases.timing("apply"):
            self._apply(commit, staged)
            self._note_applied(commit, dict(staged.updates), staged.time)

    def _show_ahead(self, version: int) -> bool:
        """Shows the rows of a version that is about to be logged; False: nobody can see them. The lock is held."""
        return False

    def _log_behind(self, commit: Commit, lock: ExitStack) -> Future[None]:
        """Logs the commit that was applied, on another thread, which then closes `lock`. Done once it has."""

        def log() -> None:
            with lock:
                self._log_noted(commit)

        if self._appender is None:
            self._appender = ThreadPoolExecutor(1, "elastable-append")
        try:
            return self._appender.submit(carried(log))
        except RuntimeError:  # the store is being closed, and that thread has ended
            log()
            return at_once(None)

    def _end_appending(self) -> None:
        """Waits for what is being logged on another thread."""
        if self._appender is not None:
            self._appender.shutdown()

    def _apply(self, commit: Commit, staged: StagedCommit) -> None:
        self._pins.sweep()
        for table, update in staged.updates:
            table.claim(update, self._pool, commit.version)

        def apply(number: int, start: int, stop: int) -> None:
            table, update = staged.updates[number]
            with np.errstate(all="ignore"):  # as Keras does; an overflow must not end a commit half way
                table.apply(update, start, stop)

        share_rows(self._pool, [len(update.batch) for _, update in staged.updates], apply)
        for name, table in self._tables.items():
            if name in commit.frozen:
                table.stay(commit.ends_chapter)
                continue
            table.follow(commit.step, self._rate(table, commit), commit.ends_chapter)
            table.evict(commit.version, staged.time, commit.cuts.get(name))
