"""That LLVM runs the fused optimizers many columns at a time: it says nothing where it does not."""

import re

import numba
import numpy as np
import pytest

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.optimizers import fused
from elastable.embedding_store.optimizers.fused import FUSED, KernelOptimizer
from elastable.embedding_store.optimizers.registry import row_optimizer

ROWS, PLACES, ONE = numba.float32[:, ::1], numba.int64[::1], numba.float32
COMPILED = {"nogil": True, "error_model": "numpy", "fastmath": False}
SPECS = [
    *(OptimizerSpec.of(name) for name in sorted(set(FUSED) - {"adamw", "rowwise_adagrad"})),
    OptimizerSpec.of("adam", amsgrad=1),
    *(OptimizerSpec.of("rmsprop", centered=c, momentum=m) for c, m in ((1, 0.0), (0, 0.9), (1, 0.9))),
    *(OptimizerSpec.of("sgd", momentum=0.9, nesterov=nesterov) for nesterov in (0, 1)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: f"{spec.name}-{'-'.join(name for name, _ in spec.hyperparameters)}"
)
def test_columns_are_computed_in_vectors(spec: OptimizerSpec) -> None:
    optimizer = row_optimizer(spec)
    assert isinstance(optimizer, KernelOptimizer)
    scalars = numba.typeof(optimizer.scalars(0, np.float32(0.1)))
    types = (numba.int64, numba.types.Tuple((ROWS, PLACES, ROWS, PLACES, ROWS, ONE, ONE, scalars)))
    (text,) = numba.njit(types, **COMPILED)(optimizer.kernel.py_func).inspect_llvm().values()  # type: ignore[attr-defined]
    assert re.search(r"fsub <\d+ x float>", text), f"the loop over columns of {spec} is not vectorised"


def test_columns_of_rowwise_adagrad_are_computed_in_vectors() -> None:
    function = fused._rowwise_adagrad.py_func  # type: ignore[attr-defined]
    types = (ROWS, PLACES, ROWS, PLACES, ROWS, numba.float32[::1], numba.types.UniTuple(ONE, 3))
    (text,) = numba.njit(types, **COMPILED)(function).inspect_llvm().values()
    assert re.search(r"fsub <\d+ x float>", text)
