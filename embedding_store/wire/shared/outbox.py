"""Memory in which a process lays down what it sends to another one of its host, instead of sending it.

The sender makes it and hands its descriptor over at the `attachment_door`; the
connection says how long it is good. A message then names the outbox and the
stamp of what lies in it. Whoever reads copies it out before the sender hears
an answer, and only then does the sender write the next.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.support.memory_mapping import FileMapping
from elastable.embedding_store.wire.messages.body_plan import BodyPlan
from elastable.embedding_store.wire.shared.attachment import OUTBOX, connected, receive_packet
from elastable.embedding_store.wire.shared.sealed_memory import require_sealed

__all__ = ["Letter", "Outbox", "Outboxes"]

_HEAD_BYTES = 64  # the stamp, and room so that a body begins with a cache line
_LEAST_BYTES = 1 << 20
_STAMP = np.dtype("<u8")
_WRITING = 0


@dataclass(frozen=True, slots=True)
class Letter:
    """Where something lies that was put into an outbox.

    Attributes:
        outbox: Its number, at the door where it was handed over; above 0.
        stamp: What the outbox says while it lies there; above 0.
    """

    outbox: int
    stamp: int


class Outbox:
    """The sender's side. Not for two threads at once.

    Args:
        name: Of the owner's socket, as `Attachment` takes it.
        token: To say there.

    Raises:
        OSError: there is no such socket on this host, or no memory to share.
    """

    def __init__(self, name: str, token: bytes) -> None:
        self._fd = os.memfd_create("elastable-outbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd).atexit = False
        # Whoever has mapped it would be killed at what is gone.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._make_room(_LEAST_BYTES)
        self._connection = connected(name)
        try:
            socket.send_fds(self._connection, [token + OUTBOX], [self._fd])
            answer, _ = receive_packet(self._connection)
            number = None if answer is None else answer.get("outbox")
            if type(number) is not int:
                raise ConnectionError("the owner of the memory hung up")
        except BaseException:
            self._connection.close()
            raise
        self.number: int = number
        self._last = 0

    def put(self, arrays: Sequence[npt.NDArray[Any]]) -> Letter:
        """Lays arrays down, one behind the other; what lay there before is gone.

        Raises:
            OSError: the system has no room for them.
        """
        size = sum(array.nbytes for array in arrays)
        if _HEAD_BYTES + size > len(self._memory):
            self._make_room(_HEAD_BYTES + size + size // 8)
        stamp = self._memory[: _STAMP.itemsize].view(_STAMP)
        stamp[0] = _WRITING
        end = _HEAD_BYTES
        for array in arrays:
            if array.nbytes:
                start, end = end, end + array.nbytes
                self._memory[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._last += 1
        stamp[0] = self._last
        return Letter(self.number, self._last)

    def close(self) -> None:
        """Takes it away from the other side. Closing twice is harmless."""
        self._connection.close()

    def _make_room(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        try:
            self._memory = FileMapping(self._fd, size, size, writable=True).view(size, 1, np.dtype(np.uint8)).ravel()
        except MemoryError as error:
            raise OSError(str(error)) from error


class Outboxes:
    """The reader's side: the outboxes that were handed over. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}

    def add(self, fd: int) -> int:
        """Takes the descriptor of an outbox; its number.

        Raises:
            OSError: it can shrink under who reads it, or cannot be mapped; the descriptor is closed.
        """
        try:
            require_sealed(fd, _HEAD_BYTES)
            memory = _mapped(fd)
        except BaseException:
            os.close(fd)
            raise
        # Not counted from 1: a letter that was written for the process that was here before must find nothing.
        number = secrets.randbits(62) + 1
        with self._lock:
            self._open[number] = fd, memory
        return number

    def drop(self, number: int) -> None:
        """Forgets an outbox: its sender is gone. Whoever reads it at this moment may."""
        with self._lock:
            fd, _ = self._open.pop(number, (-1, None))
        if fd >= 0:
            os.close(fd)

    def read(self, letter: Letter, plan: BodyPlan) -> list[npt.NDArray[Any]]:
        """Copies of the arrays that a letter tells of, as `plan` declares them.

        Raises:
            Unsupported: there is no such outbox here: send what is in it.
            BadInput: the outbox is too short for them, or something else lies in it now.
        """
        with self._lock:
            found = self._open.get(letter.outbox)
            if found is None:
                raise Unsupported(f"outbox {letter.outbox} is not known here; send the body in frames")
            fd, memory = found
            if len(memory) < _HEAD_BYTES + plan.size:  # it may have grown
                memory = _mapped(fd)
                self._open[letter.outbox] = fd, memory
        if len(memory) < _HEAD_BYTES + plan.size:
            raise BadInput(
                f"outbox {letter.outbox} has room for {len(memory) - _HEAD_BYTES} bytes, "
                f"where the header declares {plan.size}"
            )
        stamp = memory[: _STAMP.itemsize].view(_STAMP)
        before = int(stamp[0])
        arrays = plan.cut(memory[_HEAD_BYTES : _HEAD_BYTES + plan.size].data)
        if not letter.stamp == before == int(stamp[0]):
            raise BadInput(f"outbox {letter.outbox} holds something else than letter {letter.stamp} by now")
        return arrays

    def close(self) -> None:
        """Forgets all of them."""
        for number in list(self._open):
            self.drop(number)


def _mapped(fd: int) -> npt.NDArray[np.uint8]:
    size = os.fstat(fd).st_size
    try:
        return FileMapping(fd, size, size, writable=False).view(size, 1, np.dtype(np.uint8)).ravel()
    except MemoryError as error:
        raise OSError(str(error)) from error
