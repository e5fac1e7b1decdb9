"""Replies of rows, gathered straight into the frames that carry them, and sent while the rest is gathered."""

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource
from elastable.embedding_store.errors import DeadlineExceeded
from elastable.embedding_store.support.clocks import compile_seconds
from elastable.embedding_store.support.memory_budget import memory_limit
from elastable.embedding_store.wire.messages.frames import FRAME_BYTES, MAX_FRAME_BYTES, ONE_FRAME_BYTES, frame_prefix

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


_LEAST_BYTES = 1 << 30
_PART = 8  # one part in so many of the memory here
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
        self._most = max(_LEAST_BYTES, memory_limit() // _PART) if most is None else most
        self._wait_s = wait_s
        self._held: Counter[str] = Counter()  # by client; "": of all
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
            while (full := self._full(size, client)) is not None:
                left = begun + self._wait_s + compile_seconds() - compiled - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                of = f" of {full}" if full else ""
                raise DeadlineExceeded(
                    f"a reply of {size} bytes waited {self._wait_s:g} s: others{of} of {self._held[full]} bytes are "
                    "still being sent; ask for less at a time"
                )
            self._count(size, client)
        try:
            yield
        finally:
            with self._changed:
                self._count(-size, client)
                self._changed.notify_all()

    def _full(self, size: int, client: str) -> str | None:
        """Whose replies leave no room for one more; "": those of all."""
        bounds = {"": self._most, client: self._most // 2}
        return next((of for of, most in bounds.items() if self._held[of] and self._held[of] + size > most), None)

    def _count(self, size: int, client: str) -> None:
        for of in ("", client):
            self._held[of] += size
            if not self._held[of]:
                del self._held[of]
