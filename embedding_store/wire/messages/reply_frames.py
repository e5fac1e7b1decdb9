"""Replies of rows, gathered straight into the frames that carry them, and sent while the rest is gathered."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tables.lookup_request import LookupRequest
from elastable.embedding_store.wire.messages.frames import FRAME_BYTES, MAX_FRAME_BYTES, ONE_FRAME_BYTES, frame_prefix

__all__ = ["ReplyFrames"]

_ROOMY_BYTES = MAX_FRAME_BYTES - 64
_GATHER_S = 600.0  # a gather is finite, and waits for locks with deadlines of its own

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


@dataclass(slots=True)
class _Frame:
    """A frame that is yet to be filled.

    Attributes:
        frame: The bytes; nobody else has seen them.
        requests: What fills its body.
    """

    frame: bytes
    requests: list[LookupRequest]


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
        self._frames: list[_Frame] = []
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
            threads: One gathers ahead, where there are several frames.

        Raises:
            As `RowSource.lookup`; frames may have been handed out by then.
        """
        requests = [request for frame in self._frames for request in frame.requests]
        if len(self._frames) == 1:
            source.lookup_into(requests, version)
            yield self._frames[0].frame
            return
        # Rows of one version: the gather goes through at its own speed, and whoever
        # sends does not hold it up, so that a slow client delays no commit.
        done: SimpleQueue[int] = SimpleQueue()
        gathering = threads.submit(self._gather, source, requests, version, done)
        gathering.add_done_callback(lambda _: done.put(len(requests)))
        reached = 0
        for frame in self._frames:
            reached += len(frame.requests)
            while (number := _next(done)) + 1 < reached:
                pass
            if number == len(requests):
                gathering.result(timeout=0)
            yield frame.frame

    def _gather(
        self, source: RowSource, requests: Sequence[LookupRequest], version: int | None, done: SimpleQueue[int]
    ) -> None:
        """Runs in a thread of its own; being a method it keeps the frames, also where nobody takes them any more."""
        source.lookup_in_order(requests, version, done.put)

    def _add(self, header: bytes | None, pieces: Sequence[tuple[str, Int64, int]], size: int) -> None:
        """Lays a frame out."""
        prefix = frame_prefix(header, size)
        frame = _new_bytes(None, len(prefix) + size)
        body = _writable(frame)
        body[: len(prefix)] = np.frombuffer(prefix, np.uint8)
        rows = body[len(prefix) :].view(np.float32)
        requests, start = [], 0
        for table, ids, dim in pieces:
            stop = start + len(ids) * dim
            requests.append(LookupRequest(table, ids, rows[start:stop].reshape(len(ids), dim)))
            start = stop
        self._frames.append(_Frame(frame, requests))


def _writable(frame: bytes) -> UInt8:
    """The memory of bytes that nobody has seen yet, which is how CPython itself fills them.

    It does not keep them alive.
    """
    return np.frombuffer(_memory_at(_bytes_address(frame), len(frame), _TO_WRITE), np.uint8)


def _next(done: SimpleQueue[int]) -> int:
    try:
        return done.get(timeout=_GATHER_S)
    except Empty:
        raise StoreFailed(f"rows were not gathered within {_GATHER_S:.0f} s") from None
