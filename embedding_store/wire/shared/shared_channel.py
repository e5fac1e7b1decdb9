"""Shared-memory channels: arrays that a process passes to another one of its host without sending them."""

import fcntl
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.support.array_body import BodyPlan, raw
from elastable.embedding_store.support.memory_mapping import FileMapping
from elastable.embedding_store.wire.shared.attachment import CHANNEL, CHANNEL_NUMBER, connected, receive_packet
from elastable.embedding_store.wire.shared.sealed_memory import require_sealed

_HEAD_BYTES = 64  # the stamp, and room so that a body begins with a cache line
_LEAST_BYTES = 1 << 20
_STAMP = np.dtype("<u8")
_WRITING = 0


@dataclass(frozen=True, slots=True)
class SharedMessage:
    """Identifies a message in a channel.

    Attributes:
        channel: The number that the receiver gave the channel; above 0.
        stamp: The stamp of the channel while the message is in it; above 0.
    """

    channel: int
    stamp: int


class SharedChannel(Closing):
    """The sender's side: its memory, and a connection that the channel lives as long as. Not for two threads at once.

    A gRPC call names the channel and the stamp of the message in it. The receiver copies the message before it answers
    the call, and the sender writes the next one only after that.

    Args:
        name: Of the owner's socket, as `Attachment` takes it.

    Raises:
        OSError: there is no such socket on this host, or no memory to share.
    """

    def __init__(self, name: str, token: bytes) -> None:
        self._fd = os.memfd_create("elastable-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd).atexit = False
        # A process that has it mapped would be killed if it read beyond its end.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._make_room(_LEAST_BYTES)
        self._connection = connected(name)
        try:
            socket.send_fds(self._connection, [token + CHANNEL], [self._fd])
            answer, _ = receive_packet(self._connection)
            number = answer.get(CHANNEL_NUMBER)
            if type(number) is not int:
                raise ConnectionError(f"the owner of the memory has {number!r} for the channel's number")
        except BaseException:
            self._connection.close()
            raise
        self.number: int = number
        self._last = 0

    def put(self, arrays: Sequence[Array]) -> SharedMessage:
        """Writes arrays one after the other; the message before is overwritten.

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
                self._memory[start:end] = raw(array)
        self._last += 1
        stamp[0] = self._last
        return SharedMessage(self.number, self._last)

    def close(self) -> None:
        """Closes the channel on both sides. Closing twice is harmless."""
        self._connection.close()

    def _make_room(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._memory = _mapped(self._fd, writable=True)


class SharedChannels:
    """The receiver's side: all channels that were passed to it. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}

    def add(self, fd: int) -> int:
        """Takes over the descriptor of a channel; returns its number.

        Raises:
            OSError: the memory could shrink while it is read, or cannot be mapped; the descriptor is closed.
        """
        try:
            require_sealed(fd, _HEAD_BYTES)
            memory = _mapped(fd)
        except BaseException:
            os.close(fd)
            raise
        # Random: a message for the process that ran here before must not find a channel.
        number = secrets.randbits(62) + 1
        with self._lock:
            self._open[number] = fd, memory
        return number

    def drop(self, number: int) -> None:
        """Forgets a channel whose sender is gone. A read under way goes on."""
        with self._lock:
            fd, _ = self._open.pop(number, (-1, None))
        if fd >= 0:
            os.close(fd)

    def read(self, message: SharedMessage, plan: BodyPlan) -> list[Array]:
        """Copies of the arrays of a message, as `plan` declares them.

        Raises:
            Unsupported: the channel is not known here; the body has to be sent.
            BadInput: the channel is too short for the message, or holds another message by now.
        """
        with self._lock:
            found = self._open.get(message.channel)
            if found is None:
                raise Unsupported(f"shared-memory channel {message.channel} is not known here; send the body in frames")
            fd, memory = found
            if len(memory) < _HEAD_BYTES + plan.size:  # it may have grown
                memory = _mapped(fd)
                self._open[message.channel] = fd, memory
        if len(memory) < _HEAD_BYTES + plan.size:
            raise BadInput(
                f"shared-memory channel {message.channel} has room for {len(memory) - _HEAD_BYTES} bytes, "
                f"where the header declares {plan.size}"
            )
        stamp = memory[: _STAMP.itemsize].view(_STAMP)
        before = int(stamp[0])
        arrays = plan.cut(memory[_HEAD_BYTES : _HEAD_BYTES + plan.size].data)
        if not message.stamp == before == int(stamp[0]):
            raise BadInput(f"shared-memory channel {message.channel} no longer holds message {message.stamp}")
        return arrays

    def close(self) -> None:
        """Forgets all of them."""
        for number in list(self._open):
            self.drop(number)


def _mapped(fd: int, writable: bool = False) -> npt.NDArray[np.uint8]:
    size = os.fstat(fd).st_size
    try:
        return FileMapping(fd, size, size, writable=writable).view(size, 1, np.dtype(np.uint8)).ravel()
    except MemoryError as error:
        raise OSError(str(error)) from error
