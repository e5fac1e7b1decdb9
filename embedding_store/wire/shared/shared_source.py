"""Rows of a store in another process, read from its memory where that is on this host, else over gRPC."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource, refuse_other_version
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import StoreFailed, Unavailable, Unsupported
from elastable.embedding_store.native.id_index import STATE_WORDS, IdIndex
from elastable.embedding_store.native.range_pool import SERIAL, RangePool, available_cores
from elastable.embedding_store.native.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.native.slab import Slab, SlabMaker
from elastable.embedding_store.support.memory_mapping import FileMapping
from elastable.embedding_store.tables.lookups import rows_request
from elastable.embedding_store.tables.row_dtypes import row_values
from elastable.embedding_store.tables.table_reader import TableReader, answer_requests
from elastable.embedding_store.wire.messages.frames import require_wire_ids
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.embedding_store.wire.shared import attachment as protocol
from elastable.embedding_store.wire.shared.attachment import Attached
from elastable.embedding_store.wire.shared.sealed_memory import require_sealed
from elastable.embedding_store.wire.shared.version_board import Notice, ReadBoard

Answer = TypeVar("Answer")


class SharedSource(RowSource):
    """The same rows, versions and errors as over gRPC; large lookups at the speed of memory.

    Whether the store's memory can be attached is asked over gRPC, at the first call and now and then while it is not. A
    store on another host, in another network namespace or without shared memory is asked over gRPC. A store that is
    gone is noticed at once, its memory is given back, and the call goes on over gRPC, which tries until its deadline
    and then raises `Unavailable`.

    Args:
        remote: The same store over gRPC; closed with this source.
        threads: For large gathers; None: one a core, at most 8.
        required: Whether to refuse a store that cannot be attached.
        ahead: Whether a lookup of one version gets its rows while the store still logs it. If the store's process dies
            before it has, there never was such a version: for workers, whose work then does not count either.

    Raises:
        Unsupported: it is required, and cannot be; says why.
        Unavailable: it is required, and the store cannot be reached.
    """

    def __init__(
        self, remote: RemoteSource, threads: int | None = None, required: bool = False, ahead: bool = False
    ) -> None:
        self._remote = remote
        near, far = "rows of the store at %s are read from its memory", "rows of the store at %s are read over gRPC: %s"
        try:
            self._attached = Attached(
                remote.connection, lambda: Attachment(*remote.attach(), threads, ahead), near, far, now=required
            )
        except Unavailable:
            raise
        except OSError as error:
            where = f"the memory of the store at {remote.address}"
            raise Unsupported(f"{where} cannot be attached: {error}; is it on this host?") from error

    @property
    def attached(self) -> bool:
        """Whether lookups go to the store's memory."""
        return self._attached.memory is not None

    def specs(self) -> dict[str, TableSpec]:
        """All tables by name."""
        return self._remote.specs()

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        for table, wanted in ids.items():
            require_wire_ids(table, wanted)

        def make(specs: Mapping[str, TableSpec]) -> list[LookupRequest]:
            return [rows_request(specs[table], wanted) for table, wanted in ids.items()]

        answered = self._near(lambda attachment: attachment.answer(ids.keys(), make, version))
        if answered is None:
            return self._remote.lookup(ids, version)
        return {request.table: request.out for request in answered}

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        names = {request.table for request in requests}
        if self._near(lambda attachment: attachment.answer(names, lambda specs: requests, version, split)) is None:
            self._remote.lookup_into(requests, version, split)

    def version(self) -> int:
        """The current version."""
        version = self._near(lambda attachment: attachment.version())
        return self._remote.version() if version is None else version

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        found = self._near(lambda attachment: attachment.wait_for_version(version, timeout_s))
        if found is None:
            return self._remote.wait_for_version(version, max(end - time.monotonic(), 0.0))
        return found

    def lookup_when(self, ids: Mapping[str, Int64], version: int, wait_s: float) -> dict[str, Float32]:
        if self._attached.find() is None:
            return self._remote.lookup_when(ids, version, wait_s)  # which waits and looks up in one call
        return super().lookup_when(ids, version, wait_s)

    def forget(self) -> None:
        """Detaches: a new store may have other memory."""
        self._attached.leave(self._attached.memory)

    def close(self) -> None:
        """Detaches, and closes the connection. Closing twice is harmless."""
        self._attached.close()
        self._remote.close()

    def _near(self, ask: "Callable[[Attachment], Answer | None]") -> Answer | None:
        """What the attachment answers; None where there is none, or it does not know."""
        attachment = self._attached.find()
        if attachment is None:
            return None
        try:
            return ask(attachment)
        except Detached:
            self._attached.leave(attachment)  # the owner is gone, or has closed its store
            # Whatever was to be waited for: a store that is gone for good is to be missed within the deadline.
            self._remote.version()
            return None


# The client of an attachment server: reads the rows of a store from its memory


_ATTEMPTS = 8
_LONGEST_CHANGE_S = 1.0  # then the store is asked over gRPC, whose lock is fair
_LISTEN_S = 0.05  # at a time, so that threads that wait for other versions get to listen, too
_MOST_THREADS = 8
_HUNG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL


class Detached(Exception):
    """The owner has closed its store or has exited."""


class Attachment(Closing):
    """The memory of one store. Safe to use from many threads at once.

    Args:
        name: Of the owner's socket.
        token: The secret that its server asks for.

    Raises:
        OSError: there is no such socket on this host.
    """

    def __init__(self, name: str, token: bytes, threads: int | None = None, ahead: bool = False) -> None:
        self._name = name
        self._ahead = ahead
        self._token = token
        self._pool = RangePool(min(available_cores(), _MOST_THREADS) if threads is None else threads)
        self._notifications = protocol.connected(name)
        try:
            self._notifications.send(token + protocol.NOTIFICATIONS)
            _, descriptors = protocol.receive_packet(self._notifications)
            if len(descriptors) != 1:
                raise ConnectionError(f"the owner of the memory sent {len(descriptors)} boards")
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
            make: Makes the requests, once the specs of the tables are known.
            split: Whether one request may be shared by threads.

        Returns:
            The requests, answered; None if the store has to be asked over gRPC this time.

        Raises:
            Detached: the owner is gone.
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
        """The current version; None if a change takes too long."""
        notice = self._settled(time.monotonic() + _LONGEST_CHANGE_S)
        return None if notice is None else notice.version

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Whether the version is current or past, once it is or after `timeout_s` seconds."""
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
        self, sequence: int, requests: Sequence[LookupRequest], held: "Mapping[str, AttachedTable]", pool: RangePool
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

    def _layout(self, generation: int) -> "tuple[int, dict[str, AttachedTable]]":
        """The tables of a generation, or of a later one."""
        if self._laid_out[0] == generation:
            return self._laid_out
        with self._mapping:
            if self._laid_out[0] != generation:
                try:
                    with protocol.connected(self._name) as connection:
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
    """

    def __init__(self, fd: int, shape: protocol.SlabShape) -> None:
        """Raises `MemoryError` where the system refuses, `StoreFailed` where there is no such slab."""
        self._columns = shape.columns
        self._dtype = np.dtype(shape.dtype)
        size = self.bytes_of(shape.rows)
        try:
            require_sealed(fd, shape.offset + size)
        except OSError as error:
            raise StoreFailed(str(error)) from error
        array = FileMapping(fd, size, size * _RESERVE_TIMES, writable=False, offset=shape.offset).view(
            shape.rows, shape.columns, self._dtype
        )
        # NumPy may think that it can be written: kernels are compiled for such arrays, and
        # would be compiled again for others. The system would not let anyone write.
        self.array = array


class AttachedTable:
    """One table of another process."""

    def __init__(self, layout: protocol.TableLayout, slabs: Sequence[MappedSlab]) -> None:
        self.spec = layout.spec
        directory, values = slabs[: len(layout.directory)], slabs[len(layout.directory) :]
        self._rows = min((len(slab.array) for slab in values), default=0)
        self._values = row_values(layout.spec, 0, _handing_out(values, layout.spec))
        self._index = directory
        self._direct = self._by_id(directory) if layout.direct else None

    def now(self, whole: Callable[[], bool]) -> TableReader:
        """The table in its current state, as long as `whole()`; made anew for each state.

        Its `read` and `fold` raise `Torn` where the state is past and positions might be anything.
        """
        directory = self._indexed() if self._direct is None else self._direct
        return TableReader(self.spec, _CheckedReads(directory, whole, self.spec.name, self._rows), self._values)

    def _indexed(self) -> RowDirectory:
        """The index in its current shape."""
        state, *others = self._index
        if len(state.array) != STATE_WORDS:
            raise StoreFailed(f"table {self.spec.name!r}: its index has {len(state.array)} words, not {STATE_WORDS}")
        # The shape of the index must not change while ids are looked for: they would be looked for anywhere.
        return IdIndex(_handing_out([FixedSlab(state.array.copy()), *others], self.spec))

    def _by_id(self, slabs: Sequence[MappedSlab]) -> DirectRows:
        """Row i at position i: there must be as many as ids, as nobody looks there again."""
        size = self.spec.vocabulary_size
        if size is None or self._rows < size or len(slabs[0].array) != -(-size // 64) + 1:
            raise StoreFailed(f"table {self.spec.name!r}: {self._rows} rows of {size} lie in shared memory")
        return DirectRows(size, _handing_out(slabs, self.spec))


class _CheckedReads:
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
        self.array = array


def attached_tables(connection: socket.socket, token: bytes) -> tuple[int, dict[str, AttachedTable]]:
    """The layout's generation and its tables, asked for on a fresh connection to the owner.

    Raises:
        OSError: the owner hung up or gave no answer in time.
        StoreFailed: the answer is malformed.
        MemoryError: the system refuses to map so much.
    """
    connection.send(token + protocol.LAYOUT)
    begin, _ = protocol.receive_packet(connection)
    generation, count = begin.get("generation"), begin.get("tables")
    if type(generation) is not int or type(count) is not int:
        raise StoreFailed("the owner of shared rows does not say how many tables there are")
    tables = {}
    for _ in range(count):
        packet, descriptors = protocol.receive_packet(connection)
        try:
            table = _attached(packet, descriptors)
            tables[table.spec.name] = table
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return generation, tables


def _attached(packet: protocol.Packet, descriptors: Sequence[int]) -> AttachedTable:
    layout: protocol.TableLayout = protocol.table_from_packet(packet)
    shapes = (*layout.directory, *layout.values)
    if not layout.directory or any(shape.memory >= len(descriptors) for shape in shapes):
        raise StoreFailed(f"table {layout.spec.name!r}: {len(descriptors)} descriptors came for {len(shapes)} slabs")
    slabs = [MappedSlab(descriptors[shape.memory], shape) for shape in shapes]
    return AttachedTable(layout, slabs)


def _handing_out(given: Sequence[Slab], spec: TableSpec) -> SlabMaker:
    """A `SlabMaker` that makes none: it hands out what there is, in order."""
    slabs = iter(given)

    def next_slab(part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        slab = next(slabs, None)
        if slab is None or slab.array.shape[1] != columns or slab.array.dtype != dtype:
            raise StoreFailed(f"table {spec.name!r}: its {part} do not lie in shared memory as they should")
        return slab

    return next_slab
