"""A page that the owner of shared memory writes and other processes read: is it changing, and which version is it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.intrinsics import fence
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.support.memory_mapping import FileMapping
from elastable.embedding_store.wire.shared.sealed_memory import SealedMemory, require_sealed

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

# int64 words, each on a separate cache line
_SEQUENCE, _VERSION, _GENERATION, _CLOSED, _AHEAD = 0, 8, 16, 24, 32
_WORDS = 512
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Notice:
    """The contents of a board at one moment.

    Attributes:
        sequence: Counts beginnings and ends of changes; odd: something is changing.
        generation: Of the layout: which tables there are, and which memory holds them.
        ahead: While a change is unfinished: the version whose rows are there, and not logged yet; 0: there is none.
    """

    sequence: int
    version: int
    generation: int
    closed: bool
    ahead: int

    @property
    def changing(self) -> bool:
        """Whether the owner was in the middle of a change."""
        return bool(self.sequence & 1)


class WriteBoard:
    """The owner's board, a sequence lock. One thread at a time changes what it is about.

    The sequence is odd while the owner changes anything; a reader that finds it even, reads, and finds the same number
    again has read one state (Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012).

    Attributes:
        fd: Descriptor of its memory, for readers, who cannot write through it.
    """

    def __init__(self) -> None:
        """Raises `OSError` where the system has no such memory."""
        memory = SealedMemory("board")
        extent = memory.extent()
        assert extent is not None
        try:
            mapping = memory.mapped(extent, _WORDS * 8, 0)
        except MemoryError as error:  # a system that cannot do this
            raise OSError(f"no memory to share: {error}") from error
        self.fd = memory.fd
        self._memory = memory
        self._words = mapping.view(_WORDS, 1, np.dtype(np.int64))[:, 0]

    def begin(self) -> None:
        """From now on readers take nothing for whole. Also where a change is unfinished, and what is ahead goes."""
        _begin(self._words)

    def ahead(self, version: int) -> None:
        """The rows are those of this version, in the layout of before, until the next `begin`; the change goes on."""
        _show_ahead(self._words, version)

    def end(self, version: int, generation: int) -> None:
        """What was changed is whole, and is this version, in this layout."""
        _end(self._words, version, generation)

    def close(self) -> None:
        """Says that the store is closed. Closing twice is harmless."""
        _close(self._words)


class ReadBoard:
    """A board in another process, to read."""

    def __init__(self, fd: int) -> None:
        """Raises `OSError` where its owner could take the memory away while it is read."""
        require_sealed(fd, _WORDS * 8)
        self._words = FileMapping(fd, _WORDS * 8, 0, writable=False).view(_WORDS, 1, np.dtype(np.int64))[:, 0]
        self._words.flags.writeable = False

    def look(self) -> Notice:
        """Its contents now; where `changing`, version and generation may be of before or after."""
        sequence, version, generation, closed, ahead = _look(self._words)
        return Notice(sequence, version, generation, bool(closed), ahead)

    def unchanged(self, sequence: int) -> bool:
        """Whether everything read since the sequence was this number is of one state.

        The number is even, or was there when a version was ahead: the change then ends without touching a row.
        """
        now = _sequence_after_reading(self._words)
        return bool(now == sequence or (sequence & 1 and now == sequence + 1))


@intrinsic  # type: ignore[untyped-decorator]
def _load(typing_context: TypingContext, words: Type, index: Type) -> tuple[Signature, Callable[..., Value]]:
    """An atomic load with acquire order: nothing after it is read before it."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        parts = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(parts.data, [arguments[1]]), "acquire", _ALIGNMENT)

    return types.int64(words, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store(
    typing_context: TypingContext, words: Type, index: Type, value: Type
) -> tuple[Signature, Callable[..., Value]]:
    """An atomic store with release order: nothing before it is written after it."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        parts = context.make_array(signature.args[0])(context, builder, arguments[0])
        builder.store_atomic(arguments[2], builder.gep(parts.data, [arguments[1]]), "release", _ALIGNMENT)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), generate


@kernel
def _begin(words: Int64) -> None:
    sequence = _load(words, _SEQUENCE)
    _store(words, _AHEAD, 0)
    _store(words, _SEQUENCE, sequence + 1 + (sequence & 1))
    fence()  # the odd number is out before the first change is


@kernel
def _show_ahead(words: Int64, version: int) -> None:
    _store(words, _AHEAD, version)


@kernel
def _end(words: Int64, version: int, generation: int) -> None:
    _store(words, _VERSION, version)
    _store(words, _GENERATION, generation)
    _store(words, _AHEAD, 0)
    fence()
    _store(words, _SEQUENCE, _load(words, _SEQUENCE) + 1)


@kernel
def _close(words: Int64) -> None:
    _store(words, _CLOSED, 1)


@kernel
def _look(words: Int64) -> tuple[int, int, int, int, int]:
    sequence = _load(words, _SEQUENCE)
    version = _load(words, _VERSION)
    generation = _load(words, _GENERATION)
    return sequence, version, generation, _load(words, _CLOSED), _load(words, _AHEAD)


@kernel
def _sequence_after_reading(words: Int64) -> int:
    fence()  # what was read before was read before this
    sequence: int = _load(words, _SEQUENCE)
    return sequence
