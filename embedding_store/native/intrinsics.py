"""What numba kernels lack, as LLVM instructions: moves and folds of rows, bytes at any place, fences, prefetching.

numba's own loops over a row check at every row whether source and target overlap, and do not know its length. These
moves are written down as vector instructions; where the length of a row is common they are unrolled for it, which a
branch per row decides. They check nothing: rows must be there, must not overlap, and their columns must lie side by
side (rows may lie apart, so that a target may be some columns of a wider buffer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter
from inspect import Signature as CallSignature
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from llvmlite.ir import IRBuilder, Value
from numba.core import cgutils, types
from numba.core.types import Type
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

Types = Sequence[Type]
Values = Sequence[Value]
_Write = Callable[["BaseContext", IRBuilder, Types, Values], Value | None]
"""Writes the instructions of a call down: `write(context, builder, types of the arguments, arguments)`."""


def _instructions(names: str, result: Type = types.void, *takes: Type) -> Callable[[_Write], Callable[..., Any]]:
    """Makes a function for kernels of the instructions that it emits.

    Args:
        names: Of its arguments, with spaces between them.
        result: What the function returns.
        takes: Types that its arguments are converted to; none: they stay as they are.
    """
    parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("typing_context", *names.split())]

    def of(write: _Write) -> Callable[..., Any]:
        def call(typing_context: TypingContext, *kinds: Type) -> tuple[Signature, Callable[..., Value]]:
            def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Values) -> Value:
                value = write(context, builder, signature.args, arguments)
                return context.get_dummy_value() if value is None else value

            return result(*(takes or kinds)), generate

        call.__name__, call.__doc__ = write.__name__, write.__doc__
        call.__signature__ = CallSignature(parameters)  # type: ignore[attr-defined] # how many there are, for numba
        made: Callable[..., Any] = intrinsic(call)
        return made

    return of


_UNROLLED = (8, 16, 32, 64, 128)  # values in a row
_LANES = 16  # float32 in a cache line of 64 bytes; on older processors the compiler splits it
_STREAM_LANES = 4  # streaming stores need aligned targets: NumPy gives 16 bytes
_LINE = 64
_MOST_LINES = 8  # asked for ahead; the processor sees a longer run by itself

_BYTE, _INT32, _INT64, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _vector(lanes: int) -> ir.Type:
    return _FLOAT if lanes == 1 else ir.VectorType(_FLOAT, lanes)


def _row_address(context: BaseContext, builder: IRBuilder, kind: Type, array: Value, row: Value, of: Type) -> Value:
    """Address of the first value of `array[row]`, whatever the row."""
    parts = context.make_array(kind)(context, builder, array)
    stride = cgutils.unpack_tuple(builder, parts.strides)[0]
    start = builder.bitcast(parts.data, _BYTE.as_pointer())
    return builder.gep(start, [builder.mul(context.cast(builder, row, of, types.intp), stride)])


def _columns(context: BaseContext, builder: IRBuilder, kind: Type, array: Value) -> Value:
    return cgutils.unpack_tuple(builder, context.make_array(kind)(context, builder, array).shape)[1]


def _load(builder: IRBuilder, row: Value, lanes: int, index: Value) -> Value:
    value = builder.load(builder.gep(builder.bitcast(row, _vector(lanes).as_pointer()), [index]))
    value.align = 4
    return value


def _store(builder: IRBuilder, value: Value, row: Value, lanes: int, index: Value, stream: bool = False) -> None:
    store = builder.store(value, builder.gep(builder.bitcast(row, _vector(lanes).as_pointer()), [index]))
    store.align = 4 * lanes if stream else 4
    if stream:
        store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))


def _by_columns(
    builder: IRBuilder, columns: Value, unrolled: Callable[[int], None], any_length: Callable[[], None]
) -> None:
    """Runs `unrolled(n)` where `columns` is one of the common n, else `any_length()`."""
    otherwise, done = builder.append_basic_block("any_columns"), builder.append_basic_block("row_done")
    choice = builder.switch(columns, otherwise)
    for known in _UNROLLED:
        block = builder.append_basic_block(f"columns_{known}")
        choice.add_case(_INT64(known), block)
        builder.position_at_end(block)
        unrolled(known)
        builder.branch(done)
    builder.position_at_end(otherwise)
    any_length()
    builder.branch(done)
    builder.position_at_end(done)


def _copying(stream: bool) -> Callable[..., None]:
    widest = _STREAM_LANES if stream else _LANES

    @_instructions("out at rows position")
    def copy(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
        to = _row_address(context, builder, kinds[0], arguments[0], arguments[1], kinds[1])
        of = _row_address(context, builder, kinds[2], arguments[2], arguments[3], kinds[3])
        columns = _columns(context, builder, kinds[2], arguments[2])

        def unrolled(known: int) -> None:
            lanes = min(known, widest)
            values = [_load(builder, of, lanes, _INT64(k)) for k in range(known // lanes)]
            for k, value in enumerate(values):
                _store(builder, value, to, lanes, _INT64(k), stream)

        def any_length() -> None:
            blocks = builder.udiv(columns, _INT64(widest))
            with cgutils.for_range(builder, blocks, intp=_INT64) as loop:
                _store(builder, _load(builder, of, widest, loop.index), to, widest, loop.index, stream)
            if stream:
                return
            whole = builder.mul(blocks, _INT64(widest))
            with cgutils.for_range_slice(builder, whole, columns, _INT64(1), intp=_INT64) as (column, _):
                _store(builder, _load(builder, of, 1, column), to, 1, column)

        _by_columns(builder, columns, unrolled, any_length)

    return copy


copy_row = _copying(stream=False)
"""`copy_row(out, at, rows, position)`: out[at] = rows[position], float32 of as many columns."""

stream_row = _copying(stream=True)
"""As `copy_row`, past the caches. Rows of `out` begin at multiples of 16 bytes, and columns are a multiple of 4.

A kernel ends with `fence()`, so that other threads see what it wrote.
"""


def _fence(order: str) -> Callable[[], None]:
    @_instructions("")
    def fence(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
        builder.fence(order)

    return fence


fence = _fence("seq_cst")
"""`fence()`: all reads and writes before it, those of `stream_row` too, stay before those after it, everywhere."""

stores_in_order = _fence("release")
"""`stores_in_order()`: who sees a store that comes after it sees those before it, if it reads `loads_in_order`."""

loads_in_order = _fence("acquire")
"""`loads_in_order()`: what is read after it is at least as new as what was read before it."""


def adding(word: int, order: str) -> Callable[[Any, int], int]:
    """`add(state, more)`: adds to a word of int64 `state` in one step, in an LLVM order; returns what it was before."""

    @_instructions("state more", types.int64)
    def add(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> Value:
        data = context.make_array(kinds[0])(context, builder, arguments[0]).data
        more = context.cast(builder, arguments[1], kinds[1], types.int64)
        return builder.atomic_rmw("add", builder.gep(data, [_INT64(word)]), more, order)

    return add


def _ask_for(builder: IRBuilder, address: Value) -> None:
    byte_pointer = _BYTE.as_pointer()
    call = ir.FunctionType(ir.VoidType(), [byte_pointer, _INT32, _INT32, _INT32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], call)
    builder.call(ask, [address, _INT32(0), _INT32(3), _INT32(1)])


@_instructions("array row column")
def prefetch_line(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
    """`prefetch_line(array, row, column)`: asks for a cache line; never faults, whatever the address."""
    parts = context.make_array(kinds[0])(context, builder, arguments[0])
    address = builder.bitcast(parts.data, _BYTE.as_pointer())
    strides = cgutils.unpack_tuple(builder, parts.strides)
    for value, kind, stride in zip(arguments[1:], kinds[1:], strides, strict=True):
        address = builder.gep(address, [builder.mul(context.cast(builder, value, kind, types.intp), stride)])
    _ask_for(builder, address)


@_instructions("rows position")
def prefetch_row(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
    """`prefetch_row(rows, position)`: asks for the row's cache lines, of long rows the first; never faults."""
    row = _row_address(context, builder, kinds[0], arguments[0], arguments[1], kinds[1])
    columns = _columns(context, builder, kinds[0], arguments[0])

    def unrolled(known: int) -> None:
        for line in reversed(range(max(1, known // _LANES))):  # upwards it would look like a run that goes on
            _ask_for(builder, builder.gep(row, [_INT64(_LINE * line)]))

    def any_length() -> None:
        lines = builder.udiv(builder.add(columns, _INT64(_LANES - 1)), _INT64(_LANES))
        few = builder.icmp_unsigned("<", lines, _INT64(_MOST_LINES))
        with cgutils.for_range(builder, builder.select(few, lines, _INT64(_MOST_LINES)), intp=_INT64) as loop:
            _ask_for(builder, builder.gep(row, [builder.mul(loop.index, _INT64(_LINE))]))

    _by_columns(builder, columns, unrolled, any_length)


_FOLDED = ((8, 16), (4, 16), (2, 16), (1, 16), (1, 8), (1, 4), (1, 2), (1, 1))
"""Vectors and lanes that are kept in registers at a time: 128, 64, ... 1 columns."""


@_instructions("out at rows fresh positions weights start stop ahead")
def fold_row(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
    """`fold_row(out, at, rows, fresh, positions, weights, start, stop, ahead)`: a left fold of rows, in registers.

    out[at] = 0 + rows[positions[start]] + ... + rows[positions[stop - 1]], one addition after the other. A position
    p < 0 means row `~p` of `fresh`. Rows are asked for `ahead` positions early. Positions are int64 `[m]` and
    contiguous, with m >= 1. Weights are None, or float32 `[m]` and contiguous: each row is multiplied by its own and
    rounded before it is added.
    """
    fold = _Fold(context, builder, kinds, arguments)
    columns = _columns(context, builder, kinds[2], arguments[2])
    column = cgutils.alloca_once_value(builder, _INT64(0))
    for vectors, lanes in _FOLDED:
        width = vectors * lanes
        more, body, done = (builder.append_basic_block(f"{name}_{width}") for name in ("more", "columns", "folded"))
        builder.branch(more)
        builder.position_at_end(more)
        begin = builder.load(column)
        builder.cbranch(builder.icmp_signed(">=", builder.sub(columns, begin), _INT64(width)), body, done)
        builder.position_at_end(body)
        _write_fold(fold, begin, vectors, lanes)
        builder.store(builder.add(begin, _INT64(width)), column)
        builder.branch(more if (vectors, lanes) == _FOLDED[0] else done)  # of the others one is enough
        builder.position_at_end(done)


class _Fold:
    """Arguments of a fold, as instructions."""

    def __init__(self, context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
        self.builder, self._context, self._kinds, self._arguments = builder, context, kinds, arguments
        self.at, self.start, self.stop, self.ahead = (self._number(k) for k in (1, 6, 7, 8))
        self.positions = self._items(4)
        self.weights = None if kinds[5] == types.none else self._items(5)
        count = cgutils.unpack_tuple(builder, context.make_array(kinds[4])(context, builder, arguments[4]).shape)[0]
        self.last = builder.sub(count, _INT64(1))

    def row(self, k: int, row: Value, column: Value) -> Value:
        """Address of a column of row `row`, an int64, of argument k."""
        address = _row_address(self._context, self.builder, self._kinds[k], self._arguments[k], row, types.int64)
        return self.builder.gep(address, [self.builder.mul(column, _INT64(4))])

    def position(self, i: Value) -> Value:
        """positions[i]"""
        return self.builder.load(self.builder.gep(self.positions, [i]))

    def weighted(self, value: Value, i: Value, lanes: int) -> Value:
        """`value`, times weights[i] if there are any."""
        if self.weights is None:
            return value
        weight = self.builder.load(self.builder.gep(self.weights, [i]))
        if lanes > 1:
            nothing = ir.Constant(_vector(lanes), ir.Undefined)
            one = self.builder.insert_element(nothing, weight, _INT32(0))
            every_lane = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
            weight = self.builder.shuffle_vector(one, nothing, every_lane)
        return self.builder.fmul(value, weight)

    def _number(self, k: int) -> Value:
        """Argument k as int64."""
        return self._context.cast(self.builder, self._arguments[k], self._kinds[k], types.int64)

    def _items(self, k: int) -> Value:
        return self._context.make_array(self._kinds[k])(self._context, self.builder, self._arguments[k]).data


def _write_fold(a: _Fold, column: Value, vectors: int, lanes: int) -> None:
    """The fold of `vectors * lanes` columns from `column` on, from the first row to the last."""
    builder = a.builder
    entry = builder.block
    head, body, done = (builder.append_basic_block(f"fold_{name}") for name in ("head", "body", "done"))
    builder.branch(head)

    builder.position_at_end(head)
    i = builder.phi(_INT64)
    i.add_incoming(a.start, entry)
    totals = [builder.phi(_vector(lanes)) for _ in range(vectors)]
    for total in totals:
        total.add_incoming(ir.Constant(_vector(lanes), 0.0 if lanes == 1 else [0.0] * lanes), entry)
    builder.cbranch(builder.icmp_signed("<", i, a.stop), body, done)

    builder.position_at_end(body)
    later = builder.add(i, a.ahead)
    later = builder.select(builder.icmp_signed("<", later, a.last), later, a.last)
    coming = a.row(2, a.position(later), column)
    for line in reversed(range(max(1, vectors * lanes // _LANES))):
        _ask_for(builder, builder.gep(coming, [_INT64(_LINE * line)]))
    position = a.position(i)
    fresh = builder.icmp_signed("<", position, _INT64(0))
    row = builder.select(fresh, a.row(3, builder.not_(position), column), a.row(2, position, column))
    for k, total in enumerate(totals):
        value = a.weighted(_load(builder, row, lanes, _INT64(k)), i, lanes)
        total.add_incoming(builder.fadd(total, value), body)
    i.add_incoming(builder.add(i, _INT64(1)), body)
    builder.branch(head)

    builder.position_at_end(done)
    to = a.row(0, a.at, column)
    for k, total in enumerate(totals):
        _store(builder, total, to, lanes, _INT64(k))


# Bytes at any place: `memcpy`, and words. Byte loops run at a fifth of their speed


def _byte_address(context: BaseContext, builder: IRBuilder, array: Value, kind: Type, at: Value, of: Type) -> Value:
    start = builder.bitcast(context.make_array(kind)(context, builder, array).data, _BYTE.as_pointer())
    return builder.gep(start, [context.cast(builder, at, of, types.intp)])


@_instructions("target target_at source source_at count")
def copy_bytes(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
    """`copy_bytes(target, target_at, source, source_at, count)`, uint8 arrays that do not overlap; unchecked."""
    to = _byte_address(context, builder, arguments[0], kinds[0], arguments[1], kinds[1])
    of = _byte_address(context, builder, arguments[2], kinds[2], arguments[3], kinds[3])
    cgutils.raw_memcpy(builder, to, of, context.cast(builder, arguments[4], kinds[4], types.intp), 1)


@_instructions("source at", types.uint64)
def word_at(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> Value:
    """`word_at(source, at)`: 8 bytes of a uint8 array, anywhere, as a uint64; unchecked."""
    byte = _byte_address(context, builder, arguments[0], kinds[0], arguments[1], kinds[1])
    return builder.load(builder.bitcast(byte, _INT64.as_pointer()), align=1)


@_instructions("target at word")
def put_word(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> None:
    """`put_word(target, at, word)`: the 8 bytes of an integer into a uint8 array, anywhere; unchecked."""
    byte = _byte_address(context, builder, arguments[0], kinds[0], arguments[1], kinds[1])
    word = context.cast(builder, arguments[2], kinds[2], types.uint64)
    builder.store(word, builder.bitcast(byte, _INT64.as_pointer()), align=1)


# Bits of a float32, reinterpreted and never converted


@_instructions("value", types.uint32, types.float32)
def bits_of(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> Value:
    """The 32 bits of a float32, as uint32."""
    return builder.bitcast(arguments[0], _INT32)


@_instructions("bits", types.float32, types.uint32)
def float_of(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> Value:
    """The float32 that has these 32 bits, a uint32."""
    return builder.bitcast(arguments[0], _FLOAT)


@_instructions("array row blocks", types.float32)
def lane_squares(context: BaseContext, builder: IRBuilder, kinds: Types, arguments: Values) -> Value:
    """`lane_squares(array, row, blocks)`: the squares of the first 16 * blocks values of a float32 row, in 16 sums.

    The sums are joined pairwise. Written in LLVM's own words: without fast-math LLVM may not reorder a sum, and a
    loop over an array of 16 sums goes through memory (measured: 2 to 3 times the time of the whole kernel).
    """
    start = _row_address(context, builder, kinds[0], arguments[0], arguments[1], kinds[1])
    blocks = context.cast(builder, arguments[2], kinds[2], types.intp)
    sums = cgutils.alloca_once_value(builder, ir.Constant(_vector(_LANES), [0.0] * _LANES))
    with cgutils.for_range(builder, blocks) as loop:
        values = _load(builder, start, _LANES, loop.index)
        builder.store(builder.fadd(builder.load(sums), builder.fmul(values, values)), sums)
    total = builder.load(sums)
    for width in (8, 4, 2, 1):
        low, high = (ir.Constant(ir.VectorType(_INT32, width), [*range(at, at + width)]) for at in (0, width))
        total = builder.fadd(builder.shuffle_vector(total, total, low), builder.shuffle_vector(total, total, high))
    return builder.extract_element(total, _INT32(0))
