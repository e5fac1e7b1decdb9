"""That LLVM runs the loops over columns many at a time: it says nothing where it does not."""

import re

import numba
import pytest
from numba.core.dispatcher import Dispatcher

from elastable.embedding_store.optimizers.dense_replay import replay_kernels as kernels
from elastable.embedding_store.optimizers.dense_replay import steps_at

F, ROWS, ONE, STEPS = numba.float32, numba.float32[:, ::1], numba.int64[::1], numba.int32[:, ::1]
TYPES = {
    **dict.fromkeys(("weights", "slots", "out", "coefficients"), ROWS),
    **dict.fromkeys(("positions", "which"), ONE),
    **dict.fromkeys(("factors", "at", "moving", "divisor", "dim", "length"), numba.int64),
    "behind": numba.types.Tuple((ROWS, ONE, ROWS, ONE, ONE, ROWS)),
    "arguments": numba.types.Tuple(
        (ROWS, ONE, ROWS, STEPS, ONE, ROWS, ONE, ROWS, numba.int64, F, F, numba.types.UniTuple(F, 4))
    ),
}


@pytest.mark.parametrize(
    ("kernel", "divides"),
    [
        (kernels.LINEAR, False),
        *((kernel, True) for kernel in kernels.DIVIDED.values()),
        (kernels.shrink_slots, False),
        (steps_at.read_cubic, True),
        (steps_at.update_adam, True),
    ],
)
def test_columns_are_computed_side_by_side(kernel: Dispatcher, divides: bool) -> None:
    function = kernel.py_func
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    types = tuple(TYPES.get(name, numba.float32) for name in names)
    (text,) = numba.njit(types, nogil=True, error_model="numpy", fastmath=False)(function).inspect_llvm().values()
    assert re.search(r"fmul <\d+ x float>", text)
    assert bool(re.search(r"fdiv <\d+ x float>", text)) == divides
