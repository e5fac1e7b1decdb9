"""The part of a table with a tier that follows steps: cold rows are read before a commit changes anything."""

from __future__ import annotations

from elastable.embedding_store.engine.dense_replay.table_replay import DenseReplay
from elastable.embedding_store.engine.frames.tiered_rows import TieredRows
from elastable.embedding_store.engine.memory_table import MemoryTable

__all__ = ["SweptTable"]


class SweptTable(MemoryTable):
    """Rows that are to follow come into memory while the commit may still fail.

    Where all rows are in memory, they follow once the step is taken, as in `MemoryTable`.
    """

    tiered: TieredRows

    def make_ready_to_follow(self) -> None:
        if self.replay is not None and not self.tiered.whole:
            try:
                self.replay.sweep(self._directory, self._rows, self._members, self.versions, self.tiered.bring)
            finally:
                self.tiered.release()

    def replay_step(self, step: int, rate: float, ends_chapter: bool) -> None:
        self.make_ready_to_follow()
        super().replay_step(step, rate, ends_chapter)

    def _sweep(self, replay: DenseReplay) -> None:
        if self.tiered.whole:
            super()._sweep(replay)
