"""How numba kernels are compiled: without the GIL, without fast-math, cached on disk.

A kernel may call kernels of any file: see `kernel_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numba
import numpy as np
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
    "by_whole_lines",
    "inlined",
    "kernel",
    "loads_in_order",
    "prefetch",
    "prefetch_columns",
    "prefetch_distance",
    "prefetch_line",
    "stores_in_order",
    "summing_inlined",
    "summing_kernel",
]

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., object])

_PREFETCH_VALUES = 128  # of a long row: the processor sees a run by itself
_LINE_VALUES = 16  # float32 in a cache line of 64 bytes
_ANY_ORDER = {"reassoc", "nsz", "contract"}
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
    return _compiled(function, fastmath=_ANY_ORDER)


def inlined(function: F) -> F:
    """A function that LLVM copies into each kernel that calls it, for the constants of that call."""
    inside: F = numba.njit(forceinline=True, nogil=True, error_model="numpy", fastmath=False)(function)
    return inside


def summing_inlined(function: F) -> F:
    """A function that becomes part of each `summing_kernel` that calls it.

    Before LLVM sees it: LLVM would first reorder the function by itself, and the sums of one kernel would not be those
    of another that is written without the function.
    """
    inside: F = numba.njit(inline="always", nogil=True, error_model="numpy", fastmath=_ANY_ORDER)(function)
    return inside


def by_whole_lines(rows: Callable[[int, A], None]) -> Callable[[int, A], None]:
    """A function `rows(length, arguments)` compiled twice: for rows of whole cache lines, and for any others.

    Of whole lines the compiler knows that vectors come out even, which pays where computation and not memory is the
    limit. The result is to be made a kernel, or to be inlined.
    """
    some = inlined(rows)

    def choose(length: int, arguments: A) -> None:
        if length % _LINE_VALUES == 0:
            some(length // _LINE_VALUES * _LINE_VALUES, arguments)
        else:
            some(length, arguments)

    return choose


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


def _fence(order: str) -> Callable[[], None]:
    @intrinsic  # type: ignore[untyped-decorator]
    def fence(typing_context: TypingContext) -> tuple[Signature, Callable[..., Value]]:
        def generate(
            context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
        ) -> Value:
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), generate

    made: Callable[[], None] = fence
    return made


stores_in_order = _fence("release")
"""`stores_in_order()`: who sees a store that comes after it sees those before it, if it reads `loads_in_order`."""

loads_in_order = _fence("acquire")
"""`loads_in_order()`: what is read after it is at least as new as what was read before it."""


@inlined
def prefetch(array: npt.NDArray[np.generic], row: int | np.integer) -> None:
    """Asks for the cache lines of `array[row]`; any row will do, even one that does not exist.

    Of long rows only the first 128 values: the processor sees a run by itself.
    """
    prefetch_columns(array, row, array.shape[1])


@inlined
def prefetch_columns(array: npt.NDArray[np.generic], row: int | np.integer, columns: int) -> None:
    """As `prefetch`, of the first columns of a row."""
    for column in range(0, min(columns, _PREFETCH_VALUES), _LINE_VALUES):
        prefetch_line(array, row, column)


@inlined
def prefetch_distance(dim: int) -> int:
    """How many rows ahead of the update a row of `dim` values is asked for."""
    return max(_FEWEST_AHEAD, min(_MOST_AHEAD, _VALUES_AHEAD // dim))
