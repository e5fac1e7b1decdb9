"""How numba kernels are compiled: no GIL, no fast-math, cached on disk.

numba's cache watches only the file that a kernel stands in. So a kernel calls
only kernels of its own file (and those of this one and of `turns`, which change no value):
otherwise a cached caller would go on running an old callee.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from elastable.embedding_store.native.shipped_kernels import read_shipped

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

__all__ = [
    "LINE_VALUES",
    "PREFETCH_VALUES",
    "inlined",
    "kernel",
    "loads_in_order",
    "prefetch",
    "prefetch_distance",
    "prefetch_line",
    "stores_in_order",
]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}

PREFETCH_VALUES = 128  # of a long row: the processor sees a run by itself
LINE_VALUES = 16  # float32 in a cache line of 64 bytes
# Of each array that a row's update reads and writes. Measured on 2 M rows: rows of 8 to 32 values are updated up to
# twice as fast as with 8 rows ahead, rows of 64 and more no slower.
_VALUES_AHEAD = 768
_FEWEST_AHEAD, _MOST_AHEAD = 8, 48


def kernel(function: F) -> F:
    """Compiles `function` at its first call, or loads it from numba's cache.

    Arithmetic is IEEE, in the order written (no fast-math, no fused
    multiply-add), so results do not depend on the machine. Division by zero
    gives Inf or NaN, as in numpy. `NUMBA_CACHE_DIR` names another folder for
    the cache, which need not be writable if it holds the kernels already.
    """
    try:
        compiled: F = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:
        # No cache folder can be written (a read-only container): what one holds is read, and the
        # rest is compiled anew in each process, some seconds in all.
        compiled = numba.njit(**_OPTIONS)(function)
        read_shipped(compiled)
    return compiled


def inlined(function: F) -> F:
    """A function that becomes part of each kernel (of its own file) that calls it, for that call's constants.

    So a loop can be compiled once for each of some lengths that are known, and
    once for any.
    """
    inside: F = numba.njit(inline="always", **_OPTIONS)(function)
    return inside


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_line(
    typing_context: TypingContext, array: Type, row: Type, column: Type
) -> tuple[Signature, Callable[..., Value]]:
    """Asks for the cache line of `array[row, column]`; never faults, whatever the address."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        array_type, row_type, column_type = signature.args
        parts = context.make_array(array_type)(context, builder, arguments[0])
        address = builder.bitcast(parts.data, ir.IntType(8).as_pointer())
        strides = cgutils.unpack_tuple(builder, parts.strides)
        for value, kind, stride in zip(arguments[1:], (row_type, column_type), strides, strict=True):
            address = builder.gep(address, [builder.mul(context.cast(builder, value, kind, types.intp), stride)])
        word = ir.IntType(32)
        call = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        prefetch_instruction = builder.module.declare_intrinsic("llvm.prefetch", [address.type], call)
        builder.call(prefetch_instruction, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, row, column), generate


def _fence(order: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def fence(typing_context: TypingContext) -> tuple[Signature, Callable[..., Value]]:
        def generate(
            context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
        ) -> Value:
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), generate

    return fence


stores_in_order = _fence("release")
"""`stores_in_order()`: who sees a store that comes after it sees those before it, if it reads `loads_in_order`."""

loads_in_order = _fence("acquire")
"""`loads_in_order()`: what is read after it is at least as new as what was read before it."""


@kernel
def prefetch(array: npt.NDArray[Any], row: Any) -> None:
    """Asks for the cache lines of `array[row]`; any row will do, also one that is not there.

    Of long rows only the first 128 values: the processor sees a run by itself.
    """
    for column in range(0, min(array.shape[1], PREFETCH_VALUES), LINE_VALUES):
        prefetch_line(array, row, column)


@kernel
def prefetch_distance(dim: int) -> int:
    """How many rows before its turn a row of `dim` values is to be asked for, where rows are updated."""
    return max(_FEWEST_AHEAD, min(_MOST_AHEAD, _VALUES_AHEAD // dim))
