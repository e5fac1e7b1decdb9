"""Bits within kernels: those of a float32, reinterpreted and never converted, and those of an integer, mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from elastable.embedding_store.native.kernel import inlined

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

__all__ = ["bits_of", "float_of", "mixed_bits"]


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing_context: TypingContext, value: Type) -> tuple[Signature, Callable[..., Value]]:
    """The 32 bits of a float32, as uint32."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typing_context: TypingContext, bits: Type) -> tuple[Signature, Callable[..., Value]]:
    """The float32 that has these 32 bits, a uint32."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@inlined
def mixed_bits(word: np.uint64) -> np.uint64:
    """The finalizer of splitmix64 (Steele, Lea, Flood: OOPSLA 2014)."""
    h = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))
