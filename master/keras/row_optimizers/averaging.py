"""Keras' `use_ema` on tables: a moving average of every row, kept in its slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.registry import register_row_optimizer, row_optimizer
from elastable.master.keras.row_optimizers.outer_optimizer import OuterConfig, OuterRowOptimizer, outer_spec

__all__ = ["AveragedRowOptimizer", "keeps_averages", "rows_become_averages", "with_averages"]

_AVERAGED = "averaged"
_BLOCK_ROWS = 1 << 16

# Beside the slots of the optimizer within: the average, and 1 where there is one. A row that was never updated
# has none; its average begins at what it reads then, which no constant could say.
_SLOTS = (SlotSpec("average"), SlotSpec("averaged", columns=1))


def with_averages(optimizer: OptimizerSpec, momentum: float, overwrite_every: int | None) -> OptimizerSpec:
    """The optimizer that also keeps a moving average of the rows it touches.

    Args:
        optimizer: Of the table.
        momentum: Keras' `ema_momentum`.
        overwrite_every: Keras' `ema_overwrite_frequency`: in each so-manieth step the rows that it touches become
            their averages; None: in none.
    """
    config = {"momentum": float(momentum), "overwrite_every": int(overwrite_every or 0)}
    return outer_spec(_AVERAGED, optimizer, config)


def keeps_averages(spec: OptimizerSpec) -> bool:
    """Whether an optimizer, also one with a constraint, keeps averages of rows."""
    return row_optimizer(spec).slots[-len(_SLOTS) :] == _SLOTS


def rows_become_averages(
    store: EmbeddingStore, tables: Iterable[str], changed: Callable[[str, Int64], None] = lambda table, ids: None
) -> None:
    """Writes the averages of rows into the rows, as Keras does at the end of training; slots and version stay.

    Doing it again changes nothing.

    Args:
        store: Holds the tables; nothing is committed to it meanwhile.
        tables: Names; tables without averages are left alone.
        changed: Called with a table and the ids of rows that were written.

    Raises:
        StoreFailed, Unavailable: the store failed; some rows may have been written then.
    """
    specs = store.specs()
    for name in tables:
        if not keeps_averages(specs[name].optimizer):
            continue
        # Ids first: nothing is written while a scan is under way.
        for ids in [block.ids for block in store.scan(name, _BLOCK_ROWS)]:
            block = store.read_rows(name, ids)
            have = block.slots[:, -1] > 0
            averages = block.slots[have, -1 - specs[name].dim : -1]
            touches = None if block.touches is None else block.touches[have]
            if have.any():
                store.put(name, [RowBlock(block.ids[have], np.ascontiguousarray(averages), block.slots[have], touches)])
                changed(name, block.ids[have])


class AveragedRowOptimizer(OuterRowOptimizer):
    """Another optimizer's step, then a step of the averages of the rows it updated, as Keras takes it."""

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots = (*self.slots, *_SLOTS)

    def _configure(self, config: OuterConfig) -> None:
        self._momentum, self._every = float(config["momentum"]), int(config["overwrite_every"])
        if not 0.0 <= self._momentum <= 1.0 or self._every < 0:
            raise BadSpec(
                f"optimizer spec 'averaged': momentum must lie from 0 to 1 and overwrite_every not be negative, got "
                f"{self._momentum} and {self._every}"
            )

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        width, positions = self._inner.slot_width(weights.shape[1]), batch.weight_positions
        before, states_before = weights[positions], slots[batch.positions]
        states = np.ascontiguousarray(states_before[:, :width])
        self._inner.apply(weights, states, batch.at(np.arange(len(batch)), positions))
        # In the first step of all the average is the row itself.
        kept = np.float32(self._momentum if batch.step else 0.0)
        average = np.where(states_before[:, -1:] > 0, states_before[:, width:-1], before)
        average = kept * average + (np.float32(1.0) - kept) * weights[positions]
        slots[batch.positions] = np.concatenate([states, average, np.ones((len(average), 1), np.float32)], axis=1)
        if self._every and (batch.step + 1) % self._every == 0:
            weights[positions] = average


register_row_optimizer(_AVERAGED, AveragedRowOptimizer)
