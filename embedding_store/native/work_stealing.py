"""A work-stealing counter shared by kernels on several threads.

Each kernel takes some pieces of the work at a time, and more when it has done them, so a thread that starts late takes
fewer. The fewer are left, the fewer are taken at a time, so that all threads end together. Whoever takes the last piece
sees in memory that the others are done and need not be woken by them: on a virtual machine a wake-up takes as long as
folding a thousand bags.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.kernel import kernel

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

__all__ = ["WorkCounter", "fail_work", "join_work", "leave_work", "next_pieces"]

_NEXT, _INSIDE, _FAILED, _THREADS = range(4)
_WORDS = 8  # a cache line
_LOOKS = 20_000  # some tens of microseconds
_SLEEP_S = 50e-6
_DEADLINE_S = 600.0  # kernels are finite; this only keeps a dead thread from hanging its caller


class WorkCounter:
    """Counts the pieces that the kernels of one job have taken.

    Attributes:
        state: int64, for `join_work`, `next_pieces`, `fail_work` and `leave_work`.
    """

    def __init__(self, threads: int) -> None:
        """`threads`: how many may take part."""
        self.state: Int64 = np.zeros(_WORDS, np.int64)
        self.state[_THREADS] = threads

    @property
    def failed(self) -> bool:
        """Whether any kernel called `fail_work`; known once `wait` has returned."""
        return bool(self.state[_FAILED])

    def wait(self) -> None:
        """Returns when no kernel is working; for a caller whose own kernel has found no pieces left.

        Raises:
            StoreFailed: a thread did not finish its pieces.
        """
        end = 0.0
        while not _nobody_inside(self.state, _LOOKS):
            end = end or time.monotonic() + _DEADLINE_S
            if time.monotonic() > end:
                raise StoreFailed(f"a thread did not finish its pieces within {_DEADLINE_S:.0f} s")
            time.sleep(_SLEEP_S)


def _adding(word: int, order: str) -> Callable[[Int64, int], int]:
    @intrinsic  # type: ignore[untyped-decorator]
    def add(typing_context: TypingContext, state: Type, more: Type) -> tuple[Signature, Callable[..., Value]]:
        def generate(
            context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]
        ) -> Value:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            place = builder.gep(data, [ir.IntType(64)(word)])
            more = context.cast(builder, arguments[1], signature.args[1], types.int64)
            return builder.atomic_rmw("add", place, more, order)

        return types.int64(state, more), generate

    made: Callable[[Int64, int], int] = add
    return made


_add_next, _add_inside, _add_failed = (
    _adding(word, order) for word, order in ((_NEXT, "monotonic"), (_INSIDE, "seq_cst"), (_FAILED, "monotonic"))
)


@kernel
def join_work(state: Int64) -> None:
    """Makes `WorkCounter.wait` wait for this kernel."""
    _add_inside(state, 1)


@kernel
def next_pieces(state: Int64, total: int) -> tuple[int, int]:
    """Pieces for a kernel that has joined: the first, and the one behind the last; no other kernel gets them.

    Both are `total`, the number of all pieces, when none are left.
    """
    left = total - _add_next(state, 0)
    count = max(1, left // (2 * state[_THREADS]))
    first = min(total, _add_next(state, count))
    return first, min(total, first + count)


@kernel
def fail_work(state: Int64) -> None:
    """Marks the job as failed; called before `leave_work`."""
    _add_failed(state, 1)


@kernel
def leave_work(state: Int64) -> None:
    """Whoever waited sees everything that this kernel wrote."""
    _add_inside(state, -1)


@kernel
def _nobody_inside(state: Int64, looks: int) -> bool:
    inside = _add_inside(state, 0)
    while inside and looks:
        inside = _add_inside(state, 0)
        looks -= 1
    return bool(inside == 0)
