"""That LLVM runs optimizers and dense replay many columns at a time: it says nothing where it does not."""

import re
from collections.abc import Callable

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from elastable.embedding_store import OptimizerSpec
from elastable.embedding_store.optimizers import fused
from elastable.embedding_store.optimizers.dense_replay import replay_kernels as kernels
from elastable.embedding_store.optimizers.dense_replay import steps_at
from elastable.embedding_store.optimizers.fused import FUSED, KernelOptimizer
from elastable.embedding_store.optimizers.registry import row_optimizer

ROWS, PLACES, STEPS, F = numba.float32[:, ::1], numba.int64[::1], numba.int32[:, ::1], numba.float32
SPECS = [
    *(OptimizerSpec.of(name) for name in sorted(set(FUSED) - {"adamw", "rowwise_adagrad"})),
    OptimizerSpec.of("adam", amsgrad=1),
    *(OptimizerSpec.of("rmsprop", centered=c, momentum=m) for c, m in ((1, 0.0), (0, 0.9), (1, 0.9))),
    *(OptimizerSpec.of("sgd", momentum=0.9, nesterov=nesterov) for nesterov in (0, 1)),
]


TYPES = {
    **dict.fromkeys(("weights", "slots", "out", "coefficients"), ROWS),
    **dict.fromkeys(("positions", "which"), PLACES),
    **dict.fromkeys(("factors", "at", "moving", "divisor", "dim", "length"), numba.int64),
    "behind": numba.types.Tuple((ROWS, PLACES, ROWS, PLACES, PLACES, ROWS)),
    "arguments": numba.types.Tuple(
        (ROWS, PLACES, ROWS, STEPS, PLACES, ROWS, PLACES, ROWS, numba.int64, F, F, numba.types.UniTuple(F, 4))
    ),
}


def machine_code(function: Callable[..., object], types: tuple[object, ...]) -> str:
    (text,) = numba.njit(types, nogil=True, error_model="numpy", fastmath=False)(function).inspect_llvm().values()
    return str(text)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_columns_are_computed_in_vectors(spec: OptimizerSpec) -> None:
    optimizer = row_optimizer(spec)
    assert isinstance(optimizer, KernelOptimizer)
    scalars = numba.typeof(optimizer.scalars(0, np.float32(0.1)))
    types = (numba.int64, numba.types.Tuple((ROWS, PLACES, ROWS, PLACES, ROWS, F, F, scalars)))
    assert re.search(r"fsub <\d+ x float>", machine_code(optimizer.kernel.py_func, types))  # type: ignore[attr-defined]


def test_columns_of_rowwise_adagrad_are_computed_in_vectors() -> None:
    types = (ROWS, PLACES, ROWS, PLACES, ROWS, numba.float32[::1], numba.types.UniTuple(F, 3))
    assert re.search(r"fsub <\d+ x float>", machine_code(fused._rowwise_adagrad.py_func, types))  # type: ignore[attr-defined]


DIVIDING = [*kernels.DIVIDED.values(), steps_at.read_cubic, steps_at.update_adam]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel", [kernels.LINEAR, kernels.shrink_slots, *DIVIDING])
def test_columns_are_computed_side_by_side(kernel: Dispatcher) -> None:
    function = kernel.py_func
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    text = machine_code(function, tuple(TYPES.get(name, numba.float32) for name in names))
    assert re.search(r"fmul <\d+ x float>", text)
    assert bool(re.search(r"fdiv <\d+ x float>", text)) == (kernel in DIVIDING)
