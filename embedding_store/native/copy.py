"""Bytes at any place for numba kernels: `memcpy`, and words. Byte loops run at a fifth of their speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

__all__ = ["copy_bytes", "put_word", "word_at"]


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(
    typing_context: TypingContext, target: Type, target_at: Type, source: Type, source_at: Type, count: Type
) -> tuple[Signature, Callable[..., Value]]:
    """`copy_bytes(target, target_at, source, source_at, count)`, uint8 arrays that do not overlap; unchecked."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        def address(array_type: Type, array: Value, index_type: Type, index: Value) -> Value:
            start = context.make_array(array_type)(context, builder, array).data
            place = context.cast(builder, index, index_type, types.intp)
            return builder.gep(builder.bitcast(start, ir.IntType(8).as_pointer()), [place])

        kinds = signature.args
        to = address(kinds[0], arguments[0], kinds[1], arguments[1])
        of = address(kinds[2], arguments[2], kinds[3], arguments[3])
        cgutils.raw_memcpy(builder, to, of, context.cast(builder, arguments[4], kinds[4], types.intp), 1)
        return context.get_dummy_value()

    return types.void(target, target_at, source, source_at, count), generate


def _word_address(
    context: BaseContext, builder: IRBuilder, array_type: Type, array: Value, index_type: Type, index: Value
) -> Value:
    """Of 8 bytes in a uint8 array, from an index on."""
    start = context.make_array(array_type)(context, builder, array).data
    place = context.cast(builder, index, index_type, types.intp)
    byte = builder.gep(builder.bitcast(start, ir.IntType(8).as_pointer()), [place])
    return builder.bitcast(byte, ir.IntType(64).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def word_at(typing_context: TypingContext, source: Type, at: Type) -> tuple[Signature, Callable[..., Value]]:
    """`word_at(source, at)`: 8 bytes of a uint8 array, anywhere, as a uint64; unchecked."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        address = _word_address(context, builder, signature.args[0], arguments[0], signature.args[1], arguments[1])
        return builder.load(address, align=1)

    return types.uint64(source, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def put_word(
    typing_context: TypingContext, target: Type, at: Type, word: Type
) -> tuple[Signature, Callable[..., Value]]:
    """`put_word(target, at, word)`: the 8 bytes of an integer into a uint8 array, anywhere; unchecked."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        kinds = signature.args
        address = _word_address(context, builder, kinds[0], arguments[0], kinds[1], arguments[1])
        builder.store(context.cast(builder, arguments[2], kinds[2], types.uint64), address, align=1)
        return context.get_dummy_value()

    return types.void(target, at, word), generate
