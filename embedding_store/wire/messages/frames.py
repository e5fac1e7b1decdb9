"""Bulk messages as frames, encoded with one copy (docs/extending.md); rows are gathered straight into their replies."""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from elastable.embedding_store.contract.arrays import Array, Float32, Int64, UInt8
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource
from elastable.embedding_store.errors import BadIds, BadInput, DeadlineExceeded
from elastable.embedding_store.support.array_body import BodyPlan, raw
from elastable.embedding_store.support.clocks import compile_seconds
from elastable.embedding_store.support.memory_budget import HeldBytes
from elastable.embedding_store.tables.checks import array_kind

FRAME_BYTES = 1 << 20
"""Body bytes in a frame of a message that takes several; loopback gRPC is fastest about there."""

MAX_FRAME_BYTES = 4 << 20
"""The longest frame that is sent or taken."""

MAX_ENTRIES = 1 << 14
"""Fields of a header, entries of its lists included."""

MAX_HEADER_BYTES = MAX_FRAME_BYTES - FRAME_BYTES - 64
"""The longest header; it must fit into one frame."""

ONE_FRAME_BYTES = 3584 << 10
"""A body up to this travels in one frame: a call of one frame each way costs half of a stream's threads."""

REQUEST_KEY = "elastable-request-bin"
"""Metadata that may hold the message of a call that takes one: the server then waits for none."""

METADATA_BYTES = 2 << 10
"""The longest message that our clients put there; gRPC takes 8 KiB of metadata in all."""

HEADER_TAG = 0x0A  # field 1, length-delimited
_FIELD_BYTES = 8  # the tag and the length of a body
_LONGEST_PREFIX = 16  # without the header itself
SMALL_BYTES = 4 << 10  # below this a second copy costs less than a view
BODY_TAG = 0x12  # field 2, length-delimited
_HEADER_TAG_BYTE = bytes((HEADER_TAG,))
_BODY_TAG_BYTE = bytes((BODY_TAG,))


# A bulk message of the protos is `{ Header header = 1; bytes body = 2; }` on a stream; the header is in the first frame
# only. Frames are written and read by hand, byte for byte as the generated serializers do it: those copy every buffer
# several times, and hold the GIL meanwhile.


def encode(header: bytes, arrays: Iterable[Array]) -> Iterator[bytes]:
    """The frames of one message.

    Args:
        header: The serialized header message.
        arrays: C-contiguous arrays of any shape and of plain dtypes, in header order; they must not change until the
            last frame is made.

    Yields:
        One frame or more; each is one copy of the bytes it carries.

    Raises:
        BadInput: the header does not fit into a frame.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise BadInput(f"a header of {len(header)} bytes does not fit into a frame; at most {MAX_HEADER_BYTES} do")
    prefix = b"".join((_HEADER_TAG_BYTE, _varint(len(header)), header))
    buffers, size = list[memoryview | bytes](), 0
    for array in arrays:
        small = array.nbytes <= SMALL_BYTES and array.dtype.byteorder != ">"
        buffers.append(array.tobytes() if small else raw(array))
        size += array.nbytes
    room = max(FRAME_BYTES - len(prefix), 0)
    if size <= room or (size <= ONE_FRAME_BYTES and len(prefix) + size <= MAX_FRAME_BYTES - _FIELD_BYTES):
        yield b"".join((prefix, _BODY_TAG_BYTE, _varint(size), *buffers)) if size else prefix
        return
    for pieces, held in _pieces(buffers, room):
        yield b"".join((prefix, _BODY_TAG_BYTE, _varint(held), *pieces)) if held else prefix
        prefix = b""


def require_wire_ids(table: str, ids: Int64) -> None:
    """Refuses what a frame has no room for, so that a server could not: another dtype or shape.

    Raises:
        BadIds: anything but int64 `[n]`; names the table.
    """
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise BadIds(f"ids of table {table!r} must be an int64 array of one dimension, got {array_kind(ids)}")


def frame_prefix(header: bytes | None, size: int) -> bytes:
    """What a frame begins with, before a body of `size` bytes: a multiple of 4 bytes, so that float32 may follow.

    Args:
        header: The serialized header; None but in the first frame.
        size: Of the body, at most `MAX_FRAME_BYTES`; without a header below 2 MiB.

    Raises:
        BadInput: the header does not fit into a frame.
    """
    if header is not None and len(header) + size > MAX_FRAME_BYTES - _LONGEST_PREFIX:
        raise BadInput(f"a header of {len(header)} bytes does not fit into a frame with {size} bytes of rows")
    body = _varint(size)
    # Lengths may be written longer than need be, up to five bytes.
    if header is None:
        return _BODY_TAG_BYTE + _varint(size, -(1 + len(body)) % 4)
    missing = -(2 + len(_varint(len(header))) + len(header) + len(body)) % 4
    in_header = min(missing, 5 - len(_varint(len(header))))
    lengths = _varint(len(header), in_header), _varint(size, missing - in_header)
    return b"".join((_HEADER_TAG_BYTE, lengths[0], header, _BODY_TAG_BYTE, lengths[1]))


def _pieces(buffers: Iterable[memoryview | bytes], room: int) -> Iterator[tuple[list[memoryview | bytes], int]]:
    """Runs of bytes, with their lengths: `room` of them first, then `FRAME_BYTES` at a time."""
    pieces: list[memoryview | bytes] = []
    held = 0
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            if held == room:
                yield pieces, held
                pieces, held, room = [], 0, FRAME_BYTES
            taken = min(room - held, len(buffer) - start)
            pieces.append(buffer[start : start + taken])
            start += taken
            held += taken
    yield pieces, held


def _varint(value: int, longer: int = 0) -> bytes:
    """The value in base 128, by so many bytes longer than it need be."""
    parts = bytearray()
    while value > 0x7F or longer:
        longer -= value <= 0x7F
        parts.append(0x80 | value & 0x7F)
        value >>= 7
    parts.append(value)
    return bytes(parts)


# Reads bulk messages from their frames, into place


Header = TypeVar("Header", bound=Message)

_LENGTH_DELIMITED = 2  # of the wire types of protobuf
_FIXED_BYTES = {1: 8, 5: 4}
_LAYOUT = "expected field 1 (header, first frame only) and then field 2 (body)"


class FrameReader:
    """Reads one message from the frames of a stream.

    Making it waits for the first frame.

    Raises:
        BadInput: no frame, a malformed one, or no header in the first.
    """

    def __init__(self, frames: Iterable[bytes], message: str) -> None:
        self._frames = iter(frames)
        self._message = message
        first = next(self._frames, None)
        if first is None:
            raise BadInput(f"{message}: the stream ended before its first frame; {_LAYOUT}")
        header, self._body = _split(first, message)
        if header is None:
            raise BadInput(f"{message}: the first frame has no header; {_LAYOUT}")
        self._header = header

    def header(self, kind: type[Header]) -> Header:
        """The header, parsed.

        Raises:
            BadInput: its bytes are no message of that kind, or more entries than any call has.
        """
        if len(self._header) > 2 * MAX_ENTRIES:
            refuse_many_entries(self._header, self._message)
        try:
            return kind.FromString(self._header)
        except DecodeError as error:
            raise BadInput(
                f"{self._message}: its header of {len(self._header)} bytes is no {kind.DESCRIPTOR.full_name}: {error}"
            ) from error

    def read(self, plan: BodyPlan, to_the_end: bool = True) -> list[Array]:
        """The body's buffers as `plan` declares them.

        Args:
            plan: What the header declared.
            to_the_end: Whether the stream must end there; else more messages may follow in separate frames.

        Raises:
            BadInput: a malformed frame, or a body longer or shorter than declared.
        """
        received = len(self._body)
        targets: list[npt.NDArray[np.uint8]] = []
        if received == plan.size <= SMALL_BYTES:
            arrays = plan.cut(self._body)
        else:
            arrays = plan.allocate()
            targets = [array.reshape(-1).view(np.uint8) for array in arrays if array.size]
            self._scatter(self._body, targets, plan)
        while to_the_end or received < plan.size:
            frame = next(self._frames, None)
            if frame is None:
                break
            header, body = _split(frame, self._message)
            if header is not None:
                raise BadInput(f"{self._message}: a second header; {_LAYOUT}")
            received += len(body)
            self._scatter(body, targets, plan)
        if received == plan.size:
            return arrays
        raise BadInput(
            f"{self._message}: the body ended after {received} of the {plan.size} bytes that its header declares"
        )

    def _scatter(self, body: memoryview, targets: list[npt.NDArray[np.uint8]], plan: BodyPlan) -> None:
        """Moves `body` into the first bytes of `targets`, and drops from them what is full."""
        start = 0
        while start < len(body):
            if not targets:
                raise BadInput(
                    f"{self._message}: the body is longer than the {plan.size} bytes that its header declares"
                )
            target = targets[0]
            taken = min(len(body) - start, len(target))
            # NumPy's copy leaves the GIL to others, a memoryview's does not.
            target[:taken] = np.frombuffer(body, np.uint8, taken, start)
            start += taken
            if taken == len(target):
                del targets[0]
            else:
                targets[0] = target[taken:]


def refuse_many_entries(header: bytes, message: str) -> None:
    """Counts a header's fields before they are parsed: an empty entry takes 2 bytes of a frame and a hundred here.

    Raises:
        BadInput: more than `MAX_ENTRIES`.
    """
    position = count = 0
    while position < len(header):
        count += 1
        if count > MAX_ENTRIES:
            raise BadInput(f"{message}: more than {MAX_ENTRIES} entries in its header; split the call")
        tag, position = _number(header, position)
        if tag & 7 == _LENGTH_DELIMITED:
            length, position = _number(header, position)
            position += length
        elif tag & 7 == 0:
            _, position = _number(header, position)
        else:
            position += _FIXED_BYTES.get(tag & 7, len(header))  # what is no field at all the parser refuses


def _number(text: bytes, position: int, bits: int = 70) -> tuple[int, int]:
    """The number in base 128 at `position`, and where it ends, or is longer than `bits`."""
    value = shift = 0
    while position < len(text) and shift < bits:
        byte = text[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, position


def _split(frame: bytes, message: str) -> tuple[bytes | None, memoryview]:
    """The header, where there is one, and the body of a frame."""
    view = memoryview(frame)
    header: bytes | None = None
    position = 0
    if position < len(frame) and frame[position] == HEADER_TAG:
        start, position = _span(frame, position + 1, message)
        header = frame[start:position]
    if position == len(frame):
        return header, view[:0]
    if frame[position] != BODY_TAG:
        raise BadInput(
            f"{message}: malformed frame: {_LAYOUT}, "
            f"found byte 0x{frame[position]:02x} at {position} of {len(frame)} bytes"
        )
    start, position = _span(frame, position + 1, message)
    if position != len(frame):
        raise BadInput(f"{message}: malformed frame: {len(frame) - position} bytes follow its body; {_LAYOUT}")
    return header, view[start:position]


def _span(frame: bytes, position: int, message: str) -> tuple[int, int]:
    """Where the length-delimited field starts and ends whose length is at `position`."""
    length, start = _number(frame, position, 35)
    if start == position or frame[start - 1] > 0x7F:
        raise BadInput(f"{message}: malformed frame: a length that does not end; {_LAYOUT}")
    if start + length > len(frame):
        raise BadInput(
            f"{message}: truncated frame: a field of {length} bytes at {start} of {len(frame)} bytes; {_LAYOUT}"
        )
    return start, start + length


# Calls that send frames: as a unary call where there is one frame, as a stream where there are more


Reply = TypeVar("Reply")


class Upload(Generic[Reply]):
    """A call that sends frames; of one that is answered by frames `Reply` is an iterable of them.

    gRPC starts a thread for each call that sends a stream; on the wire a unary call is the same.

    Args:
        channel: To the server.
        path: `/package.Service/Method`.
        parse: Makes the reply of its bytes; None: it is answered by frames.
    """

    def __init__(self, channel: grpc.Channel, path: str, parse: Callable[[bytes], Reply] | None) -> None:
        frames = parse is None
        self._one: Any = (channel.unary_stream if frames else channel.unary_unary)(path, None, parse)
        self._many: Any = (channel.stream_stream if frames else channel.stream_unary)(path, None, parse)

    def __call__(self, frames: Iterator[bytes], timeout: float) -> Reply:
        """Makes the call; it, or reading frames of its reply, raises `grpc.RpcError`."""
        first, second = next(frames), next(frames, None)
        if second is None:
            reply: Reply = self._one(first, timeout=timeout)
        else:
            reply = self._many(chain((first, second), frames), timeout=timeout)
        return reply


_ROOMY_BYTES = MAX_FRAME_BYTES - 64
_GATHER_S = 0.02  # that a client may take for a reply while the store is locked against commits

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.restype = ctypes.c_void_p
_bytes_address.argtypes = [ctypes.py_object]
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_TO_WRITE = 0x200  # PyBUF_WRITE


@dataclass(frozen=True, slots=True)
class _Plan:
    """One frame.

    Attributes:
        prefix: What it begins with.
        size: Bytes of rows after the prefix.
        pieces: Table, ids and dim of the rows, in order.
    """

    prefix: bytes
    size: int
    pieces: Sequence[tuple[str, Int64, int]]

    def empty(self) -> tuple[bytes, Float32]:
        """The frame, and the memory of its rows: float32, uninitialised."""
        frame = _new_bytes(None, len(self.prefix) + self.size)
        body = _writable(frame)
        body[: len(self.prefix)] = np.frombuffer(self.prefix, np.uint8)
        return frame, body[len(self.prefix) :].view(np.float32)

    def requests(self, rows: Float32) -> Iterator[LookupRequest]:
        """What fills the rows."""
        start = 0
        for table, ids, dim in self.pieces:
            stop = start + len(ids) * dim
            yield LookupRequest(table, ids, rows[start:stop].reshape(len(ids), dim))
            start = stop


class ReplyFrames:
    """The frames of one reply of rows.

    Frames are cut between rows. What a frame's body begins with is padded, so that rows in it can be written as
    float32.

    Args:
        header: The serialized header of the reply.
        ids: Table name -> int64 `[n]`, in header order.
        dims: Table name -> dim.
    """

    def __init__(self, header: bytes, ids: Mapping[str, Int64], dims: Mapping[str, int]) -> None:
        self._plans: list[_Plan] = []
        left: bytes | None = header
        size = sum(4 * len(wanted) * dims[table] for table, wanted in ids.items())
        limit = ONE_FRAME_BYTES if size <= ONE_FRAME_BYTES else FRAME_BYTES
        if len(header) + limit > _ROOMY_BYTES:
            self._add(header, (), 0)
            left, limit = None, FRAME_BYTES
        pieces: list[tuple[str, Int64, int]] = []
        held = 0
        for table, wanted in ids.items():
            row_bytes, start = 4 * dims[table], 0
            while start < len(wanted):
                if held and held + row_bytes > limit:
                    self._add(left, pieces, held)
                    left, pieces, held = None, [], 0
                stop = min(len(wanted), start + max(1, (limit - held) // row_bytes))
                pieces.append((table, wanted[start:stop], dims[table]))
                held += (stop - start) * row_bytes
                start = stop
        self._add(left, pieces, held)

    def filled(self, source: RowSource, version: int | None, threads: Executor) -> Generator[bytes, None, None]:
        """The frames, each once its rows are in it.

        Args:
            source: Where the rows are.
            version: As of `RowSource.lookup`.
            threads: One fills the frames that a slow client has not taken yet, so that it delays no commit.

        Raises:
            As `RowSource.lookup`; frames may have been handed out by then.
        """
        if len(self._plans) == 1:
            frame, rows = self._plans[0].empty()
            source.lookup_into(list(self._plans[0].requests(rows)), version)
            yield frame
            return
        with closing(_Gather(self._gathered(source, version))) as gather:
            threads.submit(gather.finish, time.monotonic() + _GATHER_S)
            while (filled := gather.next()) is not None:
                yield filled

    def _gathered(self, source: RowSource, version: int | None) -> Generator[bytes, None, None]:
        """The frames, each filled when it is asked for; the store may be locked until the last one is filled."""
        made: deque[bytes] = deque()

        def requests() -> Iterator[LookupRequest]:
            for plan in self._plans:
                if plan.pieces:
                    frame, rows = plan.empty()
                    made.append(frame)
                    del frame  # who takes it is its only owner: once sent, its memory is the next one's
                    yield from plan.requests(rows)

        with closing(source.lookup_in_order(requests(), version)) as answers:
            for number, plan in enumerate(self._plans, 1):
                for _ in plan.pieces:
                    next(answers)
                if number == len(self._plans):
                    answers.close()  # which unlocks the store
                yield made.popleft() if plan.pieces else plan.empty()[0]

    def _add(self, header: bytes | None, pieces: Sequence[tuple[str, Int64, int]], size: int) -> None:
        self._plans.append(_Plan(frame_prefix(header, size), size, tuple(pieces)))


class _Gather:
    """Frames that are filled by whoever sends them, or all at once by another thread where the client is slow.

    A frame that its sender fills is still in a core's cache when it is sent, and no thread waits for another. But all
    rows are of one version, so the store is locked against commits meanwhile: only for a while.
    """

    def __init__(self, frames: Generator[bytes, None, None]) -> None:
        self._frames = frames
        self._filled: deque[bytes] = deque()
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # of whoever fills frames
        self._over = False

    def next(self) -> bytes | None:
        """The next frame; None at the end."""
        with self._lock:
            if self._filled:
                return self._filled.popleft()
            if self._failure is not None:
                raise self._failure
            return next(self._frames, None)

    def finish(self, at: float) -> None:
        """Waits until `at`, of `time.monotonic`, and fills what is left then."""
        time.sleep(max(at - time.monotonic(), 0.0))  # not woken before: that would cost every quick client more
        while not self._over:
            with self._lock:
                try:
                    self._filled.append(next(self._frames))
                except StopIteration:
                    return
                except Exception as error:  # noqa: BLE001 - raised to whoever takes the frame
                    self._failure = error
                    return

    def close(self) -> None:
        """Frames that are not taken by now are not needed."""
        self._over = True
        with self._lock:
            self._frames.close()


def _writable(frame: bytes) -> UInt8:
    """The memory of bytes that nobody has seen yet, which is how CPython itself fills them.

    It does not keep them alive.
    """
    return np.frombuffer(_memory_at(_bytes_address(frame), len(frame), _TO_WRITE), np.uint8)


# How many bytes of replies a server holds at once: those that are gathered, and those that nobody reads


_FREE_BYTES = 1 << 20  # of a reply that counts as nothing
_WAIT_S = 30.0


class ReplyRoom:
    """Room for replies, which larger ones wait for.

    Args:
        most: Bytes of all replies at once, half of them those of one client; a larger one has the room alone. None: an
            eighth of the memory here, at least 1 GiB.
        wait_s: Seconds that a reply waits; those in which kernels are compiled here are none.
    """

    def __init__(self, most: int | None = None, wait_s: float = _WAIT_S) -> None:
        self._bytes, self._wait_s = HeldBytes(most), wait_s
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int, client: str) -> Iterator[None]:
        """Around the making and sending of a reply of so many bytes to a client.

        Raises:
            DeadlineExceeded: others have taken the room for too long.
        """
        if size <= _FREE_BYTES:
            yield
            return
        begun, compiled = time.monotonic(), compile_seconds()
        with self._changed:
            while (full := self._bytes.full(client, size)) is not None:
                left = begun + self._wait_s + compile_seconds() - compiled - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                of, held = f" of {full}" if full else "", self._bytes.held(full)
                raise DeadlineExceeded(
                    f"a reply of {size} bytes waited {self._wait_s:g} s: others{of} of {held} bytes are still being "
                    "sent; ask for less at a time"
                )
            self._bytes.add(client, size)
        try:
            yield
        finally:
            with self._changed:
                self._bytes.add(client, -size)
                self._changed.notify_all()
