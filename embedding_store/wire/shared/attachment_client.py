"""The client of an attachment server: reads the rows of a store from its memory."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_source import LookupRequest, refuse_other_version
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.id_index import STATE_WORDS, IdIndex
from elastable.embedding_store.native.range_pool import SERIAL, RangePool, available_cores
from elastable.embedding_store.native.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.native.slab import Slab, SlabMaker
from elastable.embedding_store.support.memory_mapping import FileMapping
from elastable.embedding_store.tables import TableReader, answer_requests
from elastable.embedding_store.tables.row_dtypes import RowValues, row_values
from elastable.embedding_store.wire.shared.attachment import (
    LAYOUT,
    NOTIFICATIONS,
    Packet,
    SlabShape,
    TableLayout,
    connected,
    receive_packet,
    table_from_packet,
)
from elastable.embedding_store.wire.shared.sealed_memory import require_sealed
from elastable.embedding_store.wire.shared.version_board import Notice, ReadBoard

__all__ = ["Attachment", "Detached", "attached_tables"]

_ATTEMPTS = 8
_LONGEST_CHANGE_S = 1.0  # then the store is asked over gRPC, whose lock is fair
_LISTEN_S = 0.05  # at a time, so that threads that wait for other versions take turns
_MOST_THREADS = 8
_HUNG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL


class Detached(Exception):
    """The owner has closed its store or has exited."""


class Attachment:
    """The memory of one store. Safe to use from many threads at once.

    Args:
        name: Of the owner's socket.
        token: The secret that its server asks for.
        threads: For large gathers; None: one a core, at most 8.
        ahead: Whether rows of a version are read that is still being logged, where that version is asked for.

    Raises:
        OSError: there is no such socket on this host.
    """

    def __init__(self, name: str, token: bytes, threads: int | None = None, ahead: bool = False) -> None:
        self._name = name
        self._ahead = ahead
        self._token = token
        self._pool = RangePool(min(available_cores(), _MOST_THREADS) if threads is None else threads)
        self._notifications = connected(name)
        try:
            self._notifications.send(token + NOTIFICATIONS)
            answer, descriptors = receive_packet(self._notifications)
            if answer is None or len(descriptors) != 1:
                raise ConnectionError("the owner of the memory hung up")
            with closing(os.fdopen(descriptors[0], "rb", buffering=0)):
                self._board = ReadBoard(descriptors[0])
        except BaseException:
            self._notifications.close()
            raise
        self._notifications.setblocking(False)
        self._listening, self._mapping = threading.Lock(), threading.Lock()
        self._laid_out: tuple[int, dict[str, AttachedTable]] = (-1, {})

    def answer(
        self,
        names: Collection[str],
        make: Callable[[Mapping[str, TableSpec]], Sequence[LookupRequest]],
        version: int | None,
        split: bool = True,
    ) -> Sequence[LookupRequest] | None:
        """Answers requests from one state of the store.

        Args:
            names: Tables that are read.
            make: Makes the requests, once the specs of the tables are known.
            version: When given, the version to read, as of `lookup`.
            split: Whether one request may be shared by threads.

        Returns:
            The requests, answered; None if the store has to be asked over gRPC this time.

        Raises:
            Detached: the owner is gone.
            BadIds, IdOutOfRange, StaleVersion, FutureVersion: as `RowSource.lookup`.
        """
        give_up = time.monotonic() + _LONGEST_CHANGE_S
        for _ in range(_ATTEMPTS):
            notice = self._settled(give_up, version)
            if notice is None:
                return None
            generation, held = self._layout(notice.generation)
            if generation != notice.generation:
                continue
            if version is not None and version < notice.version:
                return None  # only the store knows pinned versions
            refuse_other_version(notice.version, version)
            if not all(name in held for name in names):
                return None  # the store says what is wrong with the table
            requests = make({name: held[name].spec for name in names})
            if self._answer_at(notice.sequence, requests, held, self._pool if split else SERIAL):
                return requests
        return None

    def version(self) -> int | None:
        """The current version; None if a change takes too long.

        Raises:
            Detached: the owner is gone.
        """
        notice = self._settled(time.monotonic() + _LONGEST_CHANGE_S)
        return None if notice is None else notice.version

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Whether the version is current or past, once it is or after `timeout_s` seconds.

        Raises:
            Detached: the owner is gone.
        """
        end = time.monotonic() + timeout_s
        while True:
            notice = self._look()
            if not notice.changing and notice.version >= version:
                return True
            if self._is_ahead(notice, version):
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._listen(min(left, _LISTEN_S))

    def close(self) -> None:
        """Closes the connection; memory is unmapped once no lookup is under way. Closing twice is harmless."""
        with suppress(OSError):
            self._notifications.shutdown(socket.SHUT_RDWR)
        self._laid_out = (-1, {})
        self._pool.close()
        with self._listening:
            self._notifications.close()

    def _answer_at(
        self, sequence: int, requests: Sequence[LookupRequest], held: Mapping[str, AttachedTable], pool: RangePool
    ) -> bool:
        """Whether the requests were answered from that state alone."""

        def whole() -> bool:
            return self._board.unchanged(sequence)

        tables = [held[request.table].now(whole) for request in requests]
        if not whole():
            return False
        try:
            answer_requests(tables, requests, pool)
        except Torn:
            return False
        return whole()

    def _look(self) -> Notice:
        """Reads the version board of an owner that is alive."""
        self._heard(select.POLLRDHUP, 0.0)
        notice = self._board.look()
        if notice.closed:
            raise Detached
        return notice

    def _is_ahead(self, notice: Notice, version: int | None) -> bool:
        """Whether rows of the wanted version are there to be read although it is not logged yet."""
        wanted = self._ahead and version is not None and notice.changing and notice.ahead == version
        return wanted and self._board.unchanged(notice.sequence)

    def _settled(self, give_up: float, version: int | None = None) -> Notice | None:
        """A state in which nothing is changing, or which has the wanted version ahead; None if none came in time."""
        while True:
            notice = self._look()
            if self._is_ahead(notice, version):
                return replace(notice, version=notice.ahead)
            if not notice.changing and self._board.unchanged(notice.sequence):
                return notice
            left = give_up - time.monotonic()
            if left <= 0:
                return None
            self._listen(min(left, _LISTEN_S))

    def _listen(self, timeout_s: float) -> None:
        """Waits for the next change: one thread reads the notifications, the others wait for that thread."""
        if not self._listening.acquire(timeout=timeout_s):
            return
        try:
            self._heard(select.POLLIN | select.POLLRDHUP, timeout_s)
            with suppress(BlockingIOError):
                while self._notifications.recv(64):
                    pass
        finally:
            self._listening.release()

    def _heard(self, events: int, timeout_s: float) -> None:
        """Waits for events of the connection; raises `Detached` if the owner has closed it."""
        poll = select.poll()  # a poll object is not for several threads
        try:
            poll.register(self._notifications, events)
        except ValueError as error:  # this attachment was closed
            raise Detached from error
        if any(event & _HUNG_UP for _, event in poll.poll(timeout_s * 1000)):
            raise Detached

    def _layout(self, generation: int) -> tuple[int, dict[str, AttachedTable]]:
        """The tables of a generation, or of a later one."""
        if self._laid_out[0] == generation:
            return self._laid_out
        with self._mapping:
            if self._laid_out[0] != generation:
                try:
                    with connected(self._name) as connection:
                        self._laid_out = attached_tables(connection, self._token)
                except OSError as error:
                    raise Detached from error
        return self._laid_out


# Tables that lie in another process' memory, mapped to be read


_RESERVE_TIMES = 4


class Torn(Exception):
    """The owner changed something while it was read; what was read is to be thrown away."""


class MappedSlab(Slab):
    """A slab of another process, to read. It does not grow: a larger one is mapped anew.

    Args:
        fd: Descriptor of its memory; the caller closes it.
        shape: What lies there.
    """

    def __init__(self, fd: int, shape: SlabShape) -> None:
        """Raises `MemoryError` where the system refuses, `StoreFailed` where no such slab lies there."""
        self._columns = shape.columns
        self._dtype = np.dtype(shape.dtype)
        size = self._bytes(shape.rows)
        try:
            require_sealed(fd, shape.offset + size)
        except OSError as error:
            raise StoreFailed(str(error)) from error
        array = FileMapping(fd, size, size * _RESERVE_TIMES, writable=False, offset=shape.offset).view(
            shape.rows, shape.columns, self._dtype
        )
        # NumPy may think that it can be written: kernels are compiled for such arrays, and
        # would be compiled again for others. The system would not let anyone write.
        self._array = array


class AttachedTable:
    """One table of another process.

    Args:
        lies: How it lies.
        slabs: Its mapped slabs.
    """

    def __init__(self, lies: TableLayout, slabs: Sequence[MappedSlab]) -> None:
        self.spec = lies.spec
        behind = len(lies.directory)
        self._rows = min((len(slab.array) for slab in slabs[behind:]), default=0)
        self._index = None if lies.direct else slabs[:behind]
        self._direct = self._directory(slabs[:behind]) if lies.direct else None
        self._values = row_values(lies.spec, 0, _handing_out(slabs[behind:], lies.spec))
        if self._direct is not None:
            self._require_room(slabs[0], lies.spec)

    def now(self, whole: Callable[[], bool]) -> TableNow:
        """The table in the state that stands, as long as `whole()`; made anew for each state."""
        if self._direct is not None:
            return TableNow(self.spec, self._direct, self._values, whole, self._rows)
        assert self._index is not None
        state, *others = self._index
        if len(state.array) != STATE_WORDS:
            raise StoreFailed(f"table {self.spec.name!r}: its index has {len(state.array)} words, not {STATE_WORDS}")
        # The shape of the index must not change while ids are looked for: they would be looked for anywhere.
        directory = self._directory([FixedSlab(state.array.copy()), *others])
        return TableNow(self.spec, directory, self._values, whole, self._rows)

    def _require_room(self, live: Slab, spec: TableSpec) -> None:
        """Of a table whose row i lies at position i there must be so many, as nobody looks there again."""
        size = spec.vocabulary_size
        if size is None or self._rows < size or len(live.array) != -(-size // 64) + 1:
            raise StoreFailed(f"table {spec.name!r}: {self._rows} rows of {size} lie in shared memory")

    def _directory(self, slabs: Sequence[Slab]) -> RowDirectory:
        new_slab = _handing_out(slabs, self.spec)
        size = self.spec.vocabulary_size
        return DirectRows(size, new_slab) if self._index is None and size is not None else IdIndex(new_slab)


class TableNow(TableReader):
    """One state of a table, to read: its ids are not looked for in any other.

    `read` and `fold` raise `Torn` where the state is past and positions might be anything.
    """

    def __init__(
        self, spec: TableSpec, directory: RowDirectory, values: RowValues, whole: Callable[[], bool], rows: int
    ) -> None:
        """`rows`: how many positions there are."""
        super().__init__(spec, _Checked(directory, whole, spec.name, rows), values)


class _Checked:
    """Finds positions, and hands none out of which it is not known that rows lie there."""

    def __init__(self, directory: RowDirectory, whole: Callable[[], bool], table: str, rows: int) -> None:
        self._directory = directory
        self._whole = whole
        self._table, self._rows = table, rows
        self.marks = directory.marks
        self.count = directory.count

    def find(self, ids: Int64, positions: Int64) -> int:
        """Raises `Torn`, or `StoreFailed` if the index leads to no row."""
        missing = self._directory.find(ids, positions)
        if not self._whole():
            raise Torn
        last = int(positions.max()) if len(positions) else -1
        if last >= self._rows or not self._directory.sound:
            where = f"it leads to position {last} of {self._rows}" if last >= self._rows else "its state is none"
            raise StoreFailed(f"table {self._table!r}: its index in shared memory is damaged; {where}")
        return missing


class FixedSlab(Slab):
    """An array as a slab."""

    def __init__(self, array: npt.NDArray[np.generic]) -> None:
        self._array = array


def attached_tables(connection: socket.socket, token: bytes) -> tuple[int, dict[str, AttachedTable]]:
    """The layout's generation and its tables, asked for on a fresh connection to the owner.

    Raises:
        OSError: the owner hung up or gave no answer in time.
        StoreFailed: the answer is malformed.
        MemoryError: the system refuses to map so much.
    """
    connection.send(token + LAYOUT)
    begin, _ = receive_packet(connection)
    if begin is None:
        raise ConnectionError("the owner of the memory hung up")
    generation, count = begin.get("generation"), begin.get("tables")
    if type(generation) is not int or type(count) is not int:
        raise StoreFailed("the owner of shared rows does not say how many tables there are")
    tables = {}
    for _ in range(count):
        packet, descriptors = receive_packet(connection)
        try:
            if packet is None:
                raise ConnectionError("the owner of the memory hung up")
            table = _attached(packet, descriptors)
            tables[table.spec.name] = table
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return generation, tables


def _attached(packet: Packet, descriptors: Sequence[int]) -> AttachedTable:
    lies: TableLayout = table_from_packet(packet)
    shapes = (*lies.directory, *lies.values)
    if not lies.directory or any(shape.memory >= len(descriptors) for shape in shapes):
        raise StoreFailed(f"table {lies.spec.name!r}: {len(descriptors)} descriptors came for {len(shapes)} slabs")
    slabs = [MappedSlab(descriptors[shape.memory], shape) for shape in shapes]
    return AttachedTable(lies, slabs)


def _handing_out(given: Sequence[Slab], spec: TableSpec) -> SlabMaker:
    """A `SlabMaker` that makes none: it hands out what there is, in order."""
    slabs = iter(given)

    def next_slab(part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        slab = next(slabs, None)
        if slab is None or slab.array.shape[1] != columns or slab.array.dtype != dtype:
            raise StoreFailed(f"table {spec.name!r}: its {part} do not lie in shared memory as they should")
        return slab

    return next_slab
