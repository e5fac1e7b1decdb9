"""A host embedding's state as arrays by name, in the order of whole rows, for any replicas and strategy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Float32
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.optimizers.registry import row_optimizer

__all__ = ["State", "block_of", "require_state", "state_of", "state_shapes"]

State = dict[str, Array]
"""Arrays by name:

* `weights`: float32 `[rows, dim]`.
* `slots/NAME`: float32 `[rows, dim]`, or `[rows, 1]` for one value per row; one for each of the optimizer's slots.
* `step`: int64 scalar, optimizer steps taken.
* `pending/lookups`: int64 scalar, lookups accumulated for the next step.
* `pending/ids`: int64 `[u]`, ascending, and `pending/gradients`: float32 `[u, dim]`, their sums.
"""


def state_of(spec: TableSpec, block: RowBlock) -> State:
    """`weights` and slots of all rows, in order."""
    state: State = {"weights": block.weights}
    start = 0
    for name, width in _slots(spec):
        state[f"slots/{name}"] = block.slots[:, start : start + width]
        start += width
    return state


def block_of(spec: TableSpec, state: Mapping[str, Array]) -> RowBlock:
    """The rows of a validated state."""
    rows = int(spec.vocabulary_size or 0)
    slots = [np.empty((rows, 0), np.float32), *(np.asarray(state[f"slots/{name}"]) for name, _ in _slots(spec))]
    joined: Float32 = np.ascontiguousarray(np.concatenate(slots, axis=1))
    return RowBlock(np.arange(rows), np.ascontiguousarray(state["weights"]), joined)


def state_shapes(spec: TableSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of every array of a state; -1 is any length."""
    rows = int(spec.vocabulary_size or 0)
    slots = {f"slots/{name}": ("float32", (rows, width)) for name, width in _slots(spec)}
    return {
        "weights": ("float32", (rows, spec.dim)),
        **slots,
        "step": ("int64", ()),
        "pending/lookups": ("int64", ()),
        "pending/ids": ("int64", (-1,)),
        "pending/gradients": ("float32", (-1, spec.dim)),
    }


def require_state(spec: TableSpec, state: Mapping[str, Array]) -> None:
    """Raises BadInput for a missing or unknown array, or one with another dtype or shape."""
    wanted = state_shapes(spec)
    for name in sorted({*wanted, *state}):
        state_name = f"host embedding {spec.name!r}: its state"
        if name not in state:
            raise BadInput(f"{state_name} has no {name!r}; it needs {', '.join(wanted)}")
        if name not in wanted:
            raise BadInput(f"{state_name} has an unknown {name!r}; known are {', '.join(wanted)}")
        dtype, shape = wanted[name]
        given = np.asarray(state[name])
        fits = len(given.shape) == len(shape) and all(w in (-1, g) for w, g in zip(shape, given.shape, strict=True))
        if given.dtype != np.dtype(dtype) or not fits:
            raise BadInput(
                f"{state_name}: {name!r} must be {dtype} {_shape_text(shape)}, got {given.dtype} {list(given.shape)}"
            )
    ids = state["pending/ids"]
    if len(ids) != len(state["pending/gradients"]) or (
        len(ids) and not (ids[0] >= 0 and ids[-1] < (spec.vocabulary_size or 0) and (np.diff(ids) > 0).all())
    ):
        raise BadInput(
            f"host embedding {spec.name!r}: its state's pending/ids must ascend in 0 <= id < {spec.vocabulary_size}, "
            "one for each row of pending/gradients"
        )


def _slots(spec: TableSpec) -> tuple[tuple[str, int], ...]:
    """The optimizer's slots and their columns, in storage order."""
    slots = row_optimizer(spec.optimizer).slots
    return tuple((slot.name, spec.dim if slot.columns is None else slot.columns) for slot in slots)


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('n' if length < 0 else str(length) for length in shape)}]"
