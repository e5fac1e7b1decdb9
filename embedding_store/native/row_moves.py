"""Moves of whole rows for numba kernels: copied, streamed past the caches, asked for ahead, folded in registers.

numba's own loops over a row check at every row whether source and target
overlap, and do not know its length. These moves are written down as vector
instructions; where the length of a row is common they are unrolled for it,
which a branch per row decides. They check nothing: rows must be there, must
not overlap, and their columns must lie side by side (rows may lie apart, so
that a target may be some columns of a wider buffer).

A kernel that uses them is compiled anew only when its own file changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

__all__ = ["FOLDS", "WEIGHTED_FOLDS", "copy_row", "drain_streams", "prefetch_row", "stream_row"]

_UNROLLED = (8, 16, 32, 64, 128)  # values in a row
_LANES = 16  # float32 in a cache line of 64 bytes; on older processors the compiler splits it
_STREAM_LANES = 4  # streaming stores need aligned targets: NumPy gives 16 bytes
_LINE = 64
_MOST_LINES = 8  # asked for ahead; the processor sees a longer run by itself

_BYTE, _INT32, _INT64, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _vector(lanes: int) -> Any:
    return _FLOAT if lanes == 1 else ir.VectorType(_FLOAT, lanes)


def _row_address(
    context: BaseContext, builder: IRBuilder, kind: Type, array: Value, row: Value, row_kind: Type
) -> Value:
    """Address of the first value of `array[row]`, whatever the row."""
    parts = context.make_array(kind)(context, builder, array)
    stride = cgutils.unpack_tuple(builder, parts.strides)[0]
    start = builder.bitcast(parts.data, _BYTE.as_pointer())
    return builder.gep(start, [builder.mul(context.cast(builder, row, row_kind, types.intp), stride)])


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


def _copying(stream: bool) -> Any:
    widest = _STREAM_LANES if stream else _LANES

    @intrinsic  # type: ignore[untyped-decorator]
    def copy(
        typing_context: TypingContext, out: Type, at: Type, rows: Type, position: Type
    ) -> tuple[Signature, Callable[..., Value]]:
        def generate(
            context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
        ) -> Value:
            kinds = signature.args
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
            return context.get_dummy_value()

        return types.void(out, at, rows, position), generate

    return copy


copy_row = _copying(stream=False)
"""`copy_row(out, at, rows, position)`: out[at] = rows[position], float32 of as many columns."""

stream_row = _copying(stream=True)
"""As `copy_row`, past the caches. Rows of `out` begin at multiples of 16 bytes, and columns are a multiple of 4.

A kernel ends with `drain_streams()`, so that other threads see what it wrote.
"""


@intrinsic  # type: ignore[untyped-decorator]
def drain_streams(typing_context: TypingContext) -> tuple[Signature, Callable[..., Value]]:
    """Whatever `stream_row` wrote is there for every thread that hears of it later."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _ask_for(builder: IRBuilder, address: Value) -> None:
    byte_pointer = _BYTE.as_pointer()
    call = ir.FunctionType(ir.VoidType(), [byte_pointer, _INT32, _INT32, _INT32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], call)
    builder.call(ask, [address, _INT32(0), _INT32(3), _INT32(1)])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_row(typing_context: TypingContext, rows: Type, position: Type) -> tuple[Signature, Callable[..., Value]]:
    """Asks for the cache lines of `rows[position]`, of long rows the first; never faults, whatever the position."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        kinds = signature.args
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
        return context.get_dummy_value()

    return types.void(rows, position), generate


def _folding(vectors: int, lanes: int, weighted: bool) -> Any:
    """A left fold of `vectors * lanes` columns, kept in registers from the first row to the last."""

    @intrinsic  # type: ignore[untyped-decorator]
    def fold(
        typing_context: TypingContext,
        out: Type,
        at: Type,
        column: Type,
        rows: Type,
        fresh: Type,
        positions: Type,
        weights: Type,
        start: Type,
        stop: Type,
        ahead: Type,
    ) -> tuple[Signature, Callable[..., Value]]:
        def generate(
            context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
        ) -> Value:
            _write_fold(_FoldArguments(context, builder, signature.args, arguments), vectors, lanes, weighted)
            return context.get_dummy_value()

        return types.void(out, at, column, rows, fresh, positions, weights, start, stop, ahead), generate

    return fold


class _FoldArguments:
    """Arguments of a fold as it is written down."""

    def __init__(self, context: BaseContext, builder: IRBuilder, kinds: Value, arguments: Sequence[Value]) -> None:
        self.builder, self._context, self._kinds, self._arguments = builder, context, kinds, arguments
        self._offset = builder.mul(self.number(2), _INT64(4))
        self.start, self.stop, self.ahead = self.number(7), self.number(8), self.number(9)
        self.positions, self.weights = self._items(5), self._items(6)
        count = cgutils.unpack_tuple(builder, context.make_array(kinds[5])(context, builder, arguments[5]).shape)[0]
        self.last = builder.sub(count, _INT64(1))

    def number(self, k: int) -> Any:
        """Argument k as int64."""
        return self._context.cast(self.builder, self._arguments[k], self._kinds[k], types.int64)

    def row(self, k: int, row: Any) -> Any:
        """Address of row `row`, an int64, of argument k, in the column that the fold begins with."""
        address = _row_address(self._context, self.builder, self._kinds[k], self._arguments[k], row, types.int64)
        return self.builder.gep(address, [self._offset])

    def position(self, i: Any) -> Any:
        """positions[i]"""
        return self.builder.load(self.builder.gep(self.positions, [i]))

    def weight(self, i: Any, lanes: int) -> Any:
        """weights[i] in every lane."""
        weight = self.builder.load(self.builder.gep(self.weights, [i]))
        if lanes == 1:
            return weight
        nothing = ir.Constant(_vector(lanes), ir.Undefined)
        one = self.builder.insert_element(nothing, weight, _INT32(0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes))

    def _items(self, k: int) -> Any:
        return self._context.make_array(self._kinds[k])(self._context, self.builder, self._arguments[k]).data


def _write_fold(a: _FoldArguments, vectors: int, lanes: int, weighted: bool) -> None:
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
    coming = a.row(3, a.position(later))
    for line in reversed(range(max(1, vectors * lanes // _LANES))):
        _ask_for(builder, builder.gep(coming, [_INT64(_LINE * line)]))
    position = a.position(i)
    fresh = builder.icmp_signed("<", position, _INT64(0))
    row = builder.select(fresh, a.row(4, builder.not_(position)), a.row(3, position))
    weight = a.weight(i, lanes) if weighted else None
    for k, total in enumerate(totals):
        value = _load(builder, row, lanes, _INT64(k))
        total.add_incoming(builder.fadd(total, value if weight is None else builder.fmul(value, weight)), body)
    i.add_incoming(builder.add(i, _INT64(1)), body)
    builder.branch(head)

    builder.position_at_end(done)
    to = a.row(0, a.number(1))
    for k, total in enumerate(totals):
        _store(builder, total, to, lanes, _INT64(k))


_SHAPES = ((8, 16), (4, 16), (2, 16), (1, 16), (1, 8), (1, 4), (1, 2), (1, 1))
"""Vectors and lanes of each fold."""

FOLDS = tuple(_folding(vectors, lanes, weighted=False) for vectors, lanes in _SHAPES)
"""Folds of 128, 64, 32, 16, 8, 4, 2 and 1 columns.

`fold(out, at, column, rows, fresh, positions, weights, start, stop, ahead)`:
out[at, column:] = 0 + rows[positions[start]] + ... + rows[positions[stop - 1]]
in those columns, one addition after the other. A position p < 0 stands for
row `~p` of `fresh`. Rows are asked for `ahead` positions before their turn.
Positions are int64 `[m]` and contiguous, with m >= 1; so are weights, which
are not looked at.
"""

WEIGHTED_FOLDS = tuple(_folding(vectors, lanes, weighted=True) for vectors, lanes in _SHAPES)
"""As `FOLDS`, each row multiplied by its entry of `weights` float32 `[m]` and rounded before it is added."""
