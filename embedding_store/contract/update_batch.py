"""One optimizer step on some rows of a table, as it travels from a commit to the kernel that does it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastable.embedding_store.contract.arrays import Float32, Int64

__all__ = ["UpdateBatch"]


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The rows, their gradients, and the scalars of the step.

    Attributes:
        ids: int64 `[u]`, each id once.
        positions: int64 `[u]`, where each id's row is: its slots, and its weights unless `weights_at` differs. Each
            once; trusted.
        gradients: float32 `[u, dim]`, C-contiguous, summed per id.
        step: Optimizer steps taken before this one (Keras' `iterations`).
        rate: Learning rate of this step.
        squares: float32 `[u]`, the mean of g² over each whole row (`TableUpdate.row_squares`), where `gradients` holds
            only some of its columns; None: rows are whole. Only `cross_column` optimizers read it.
        weights_at: int64 `[u]`, where the weights are if not at `positions`. Each once; trusted.
        frames: int64 `[u]`, what `TableRows.prepare` said of these positions; None: nothing.
    """

    ids: Int64
    positions: Int64
    gradients: Float32
    step: int
    rate: float
    squares: Float32 | None = None
    weights_at: Int64 | None = None
    frames: Int64 | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def weight_positions(self) -> Int64:
        """int64 `[u]`: where the weights are."""
        return self.positions if self.weights_at is None else self.weights_at

    def arrays(self, weights: Float32, slots: Float32) -> tuple[Float32, Int64, Float32, Int64, Float32]:
        """The first arguments of every kernel: weights, where they are, slots, where they are, gradients."""
        return weights, self.weight_positions, slots, self.positions, self.gradients

    def part(self, start: int, stop: int) -> UpdateBatch:
        """The rows from `start` to `stop`; arrays are views."""
        if start == 0 and stop >= len(self):
            return self
        piece = slice(start, stop)
        squares = None if self.squares is None else self.squares[piece]
        weights_at = None if self.weights_at is None else self.weights_at[piece]
        frames = None if self.frames is None else self.frames[piece]
        ids, positions, gradients = self.ids[piece], self.positions[piece], self.gradients[piece]
        return UpdateBatch(ids, positions, gradients, self.step, self.rate, squares, weights_at, frames)

    def chosen(self, indices: Int64, positions: Int64) -> UpdateBatch:
        """The rows at `indices` int64 `[n]`, which are at `positions` int64 `[n]`."""
        squares = None if self.squares is None else self.squares[indices]
        return UpdateBatch(self.ids[indices], positions, self.gradients[indices], self.step, self.rate, squares)

    def at(self, positions: Int64, weights_at: Int64 | None = None) -> UpdateBatch:
        """The same rows at other positions."""
        return replace(self, positions=positions, weights_at=weights_at, frames=None)
