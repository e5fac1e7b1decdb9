"""Optimizers over rows: what turns a summed gradient into new weights and slots.

An optimizer is *lazy*: it touches the rows it is given and no others. Where Keras decays the moments of every row at
every step, a row here keeps its moments as they are until it has a gradient again. A table whose optimizer spec says
`lazy=False` makes up for that: see `elastable.embedding_store.optimizers.dense_replay`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec

KERAS_BLOCK = "keras"
"""Name in specs of the optimizers that Keras itself runs; the master registers them."""


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """Values that an optimizer keeps with each row.

    Attributes:
        name: Under Keras' name, "momentum", "velocity", "accumulator", ...
        initial_value: Of a row that was never updated.
        columns: float32 values a row; None: as many as the row has weights.
        squares: Whether it sums or averages squares or sizes, and so is never negative.
    """

    name: str
    initial_value: float = 0.0
    columns: int | None = None
    squares: bool = False


Scale = Callable[[int, float], float]
"""Of a step (Keras' `iterations` before it) and its learning rate."""


@dataclass(frozen=True, slots=True)
class DenseForm:
    """What a step with a zero gradient does to a row, which `lazy=False` makes up for.

    Attributes:
        factors: What each slot is multiplied by, as float32 arithmetic does it, in double.
        moving: Number of the slot that moves the weights; -1: none does.
        scale: How far; the sign is in it.
        divisor: Number of the slot that divides; -1: none does.
        root: Whether its square root divides.
        epsilon: Added to the divisor.
        decay: Keras' `weight_decay`.
    """

    factors: tuple[float, ...]
    moving: int = -1
    scale: Scale = lambda step, rate: 1.0
    divisor: int = -1
    root: bool = False
    epsilon: float = 0.0
    decay: float = 0.0

    @property
    def still(self) -> bool:
        """Whether a step without a gradient changes nothing."""
        return not self.moves_weights and all(factor == 1 for factor in self.factors)

    @property
    def moves_weights(self) -> bool:
        """Whether a step without a gradient changes weights, and not moments alone."""
        return self.moving >= 0 or self.decay != 0

    @property
    def shrink(self) -> float:
        """What the divisor (its root, where that divides) is multiplied by at each step."""
        factor = self.factors[self.divisor] if self.divisor >= 0 else 1.0
        return math.sqrt(factor) if self.root else factor


class RowOptimizer(ABC):
    """One optimizer with its hyperparameters; holds no state.

    Attributes:
        spec: What it was made from.
        slots: Its slots, side by side in this order.
        fused: Whether `apply` updates rows in place at any positions, from
            any thread, and cannot fail; else a store hands it a gathered block.
        cross_column: Whether a column's step depends on other columns of the gradient. Where only some columns of a row
            are available, `TableUpdate.row_squares` stand for the others: see `UpdateBatch.squares`.
        whole_rows: Whether a row's columns can only be updated together.
        default_learning_rate: For commits that name none.
        hyperparameters: All by name, defaults included; of fused ones.
        dense_form: What steps without a gradient do to rows, where the spec asks
            for it (`lazy=False`) and they do anything; else None.
    """

    spec: OptimizerSpec
    slots: tuple[SlotSpec, ...]
    fused: bool = True
    cross_column: bool = False
    whole_rows: bool = False
    default_learning_rate: float
    hyperparameters: Mapping[str, float] = MappingProxyType({})
    dense_form: DenseForm | None = None

    @property
    def shown_name(self) -> str:
        """Its name in messages."""
        return self.spec.name

    def slot_width(self, dim: int) -> int:
        """float32 values that all slots of one row take."""
        return sum(dim if slot.columns is None else slot.columns for slot in self.slots)

    def initial_slots(self, dim: int) -> Float32:
        """float32 `[slot_width]`: the slots of a row that was never updated."""
        parts = [
            np.full(dim if slot.columns is None else slot.columns, slot.initial_value, np.float32)
            for slot in self.slots
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def without_gradient(self) -> DenseForm | None:
        """What a step with a zero gradient does to a row; None: it is not known, so `lazy=False` is refused."""
        return None

    @abstractmethod
    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        """One optimizer step on some rows, in place.

        Rows do not influence each other, so a batch may be cut anywhere and its parts run on any threads: the result
        is the same to the bit.

        Args:
            weights: float32 `[rows, dim]`, C-contiguous; those of the batch are at `batch.weight_positions`.
            slots: float32 `[rows, slot_width(dim)]`, C-contiguous; those of the batch are at `batch.positions`.
            batch: The rows, their gradients and the scalars of the step.
        """


Factory = Callable[[OptimizerSpec], RowOptimizer]
"""Makes an optimizer of its spec; raises `BadSpec` for hyperparameters that it does not know."""
