"""How numba kernels are compiled: no GIL, no fast-math, cached on disk.

numba's cache watches only the file that a kernel stands in. So a kernel calls
only kernels of its own file (and `prefetch`, which changes no value):
otherwise a cached caller would go on running an old callee.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["kernel", "prefetch"]

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compiles `function` at its first call, or loads it from numba's cache.

    Arithmetic is IEEE, in the order written (no fast-math, no fused
    multiply-add), so results do not depend on the machine. Division by zero
    gives Inf or NaN, as in numpy.
    """
    compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=False)(function)
    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, row: Any) -> Any:
    """`prefetch(array, row)` asks for the first cache line of `array[row]`; never faults."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, row_type = signature.args
        parts = context.make_array(array_type)(context, builder, arguments[0])
        index = context.cast(builder, arguments[1], row_type, types.intp)
        stride = cgutils.unpack_tuple(builder, parts.strides)[0]
        start = builder.bitcast(parts.data, ir.IntType(8).as_pointer())
        address = builder.gep(start, [builder.mul(index, stride)])
        word = ir.IntType(32)
        call = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        intrinsic_function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], call)
        builder.call(intrinsic_function, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, row), generate
