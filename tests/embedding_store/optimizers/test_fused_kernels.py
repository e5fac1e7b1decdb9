"""That LLVM runs the fused optimizers many columns at a time: it says nothing where it does not."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

import numba
import pytest
from numba.core.dispatcher import Dispatcher

from elastable.embedding_store.optimizers import fused

ARGUMENTS = {
    **dict.fromkeys(("places", "positions"), numba.int64[::1]),
    "dim": numba.int64,
    "nesterov": numba.boolean,
    "power": numba.float64,
    "squares_of_rows": numba.float32[::1],
    **dict.fromkeys(("weights", "slots", "gradients"), numba.float32[:, ::1]),
}


def updates() -> dict[str, Any]:
    """The kernels that change rows, by name."""
    found = {}
    for module in pkgutil.iter_modules(fused.__path__):
        names = vars(importlib.import_module(f"elastable.embedding_store.optimizers.fused.{module.name}"))
        for name, kernel in names.items():
            if isinstance(kernel, Dispatcher) and "positions" in kernel.py_func.__code__.co_varnames:
                found[f"{module.name}.{name}"] = kernel
    return found


@pytest.mark.parametrize("name", sorted(updates()))
def test_columns_are_computed_side_by_side(name: str) -> None:
    function = updates()[name].py_func
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    types = [ARGUMENTS.get("squares_of_rows" if one == "squares" else one, numba.float32) for one in names]
    compiled = numba.njit(tuple(types), nogil=True, error_model="numpy", fastmath=False)(function)
    (text,) = compiled.inspect_llvm().values()
    assert re.search(r"fsub <\d+ x float>", text), f"the loop over columns of {name} is not vectorised"
