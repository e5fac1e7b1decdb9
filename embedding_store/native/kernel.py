"""How numba kernels are compiled: without the GIL, without fast-math, cached on disk.

A kernel may call kernels of any file: see `kernel_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from elastable.embedding_store.native.kernel_cache import keep_on_disk

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

F = TypeVar("F", bound=Callable[..., object])

PREFETCH_VALUES = 128  # of a long row: the processor sees a run by itself
LINE_VALUES = 16  # float32 in a cache line of 64 bytes
# Of each array that a row's update reads and writes. Measured on 2 M rows: rows of 8 to 32 values are updated up to
# twice as fast as with 8 rows ahead, rows of 64 and more no slower.
_VALUES_AHEAD = 768
_FEWEST_AHEAD, _MOST_AHEAD = 8, 48


def kernel(function: F) -> F:
    """Compiles `function` at its first call, or loads what an earlier process compiled.

    Arithmetic is IEEE, in the order written (no fast-math, no fused
    multiply-add), so results do not depend on the machine. Division by zero
    gives Inf or NaN, as in numpy. `NUMBA_CACHE_DIR` names another folder for
    the compiled code, which need not be writable if it holds the kernels already.
    """
    return _compiled(function, fastmath=False)


def summing_kernel(function: F) -> F:
    """As `kernel`, but sums are taken in any order, in as many lanes as the processor has.

    NaN and Inf stay what they are. How the sum over one pair of vectors is
    taken does not depend on which others are in the call, so a pair has the
    same sum to the bit wherever it is computed, on machines of one kind; other
    processors may differ in the last bit, as with any BLAS.
    """
    return _compiled(function, fastmath={"reassoc", "nsz", "contract"})


def inlined(function: F) -> F:
    """A function that LLVM copies into each kernel that calls it, for the constants of that call."""
    inside: F = numba.njit(forceinline=True, nogil=True, error_model="numpy", fastmath=False)(function)
    return inside


def _compiled(function: F, fastmath: bool | set[str]) -> F:
    compiled: F = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    keep_on_disk(compiled)
    return compiled


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
