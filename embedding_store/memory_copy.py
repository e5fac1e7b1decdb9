"""`memcpy` for numba kernels: byte loops over unaligned rows run at a fifth of its speed."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["copy_bytes"]


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing_context: Any, target: Any, target_at: Any, source: Any, source_at: Any, count: Any) -> Any:
    """`copy_bytes(target, target_at, source, source_at, count)`, uint8 arrays that do not overlap; unchecked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def address(array_type: Any, array: Any, index_type: Any, index: Any) -> Any:
            start = context.make_array(array_type)(context, builder, array).data
            place = context.cast(builder, index, index_type, types.intp)
            return builder.gep(builder.bitcast(start, ir.IntType(8).as_pointer()), [place])

        kinds = signature.args
        to = address(kinds[0], arguments[0], kinds[1], arguments[1])
        of = address(kinds[2], arguments[2], kinds[3], arguments[3])
        cgutils.raw_memcpy(builder, to, of, context.cast(builder, arguments[4], kinds[4], types.intp), 1)
        return context.get_dummy_value()

    return types.void(target, target_at, source, source_at, count), generate
