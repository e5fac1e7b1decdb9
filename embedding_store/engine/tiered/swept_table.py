"""The part of a table with a tier that follows steps: cold rows are read before a commit changes anything."""

from __future__ import annotations

from elastable.embedding_store.contract.arrays import Int64
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
                self.replay.sweep(self._directory, self._rows, self._members, self.versions, self._into_memory)
            finally:
                self._end_sweep()

    def replay_step(self, step: int, rate: float, ends_chapter: bool) -> None:
        self.make_ready_to_follow()
        super().replay_step(step, rate, ends_chapter)

    def _sweep(self, replay: DenseReplay) -> None:
        if self.tiered.whole:
            super()._sweep(replay)

    def _into_memory(self, ids: Int64, positions: Int64) -> Int64:
        """Brings the rows of `ids` int64 `[n]`, each once, that `positions` were found for; returns where they are."""
        self.tiered.bring(positions)
        return positions

    def _end_sweep(self) -> None:
        """Rows that were swept may leave memory again."""
        self.tiered.release()
