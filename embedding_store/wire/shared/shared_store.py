"""A memory store whose rows other processes of the host read for themselves, and the server that lets them."""

import errno
import hmac
import logging
import os
import resource
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.slab import Slab, anonymous_slab
from elastable.embedding_store.support.memory_mapping import HUGE_PAGE_BYTES, FileMapping
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.wire.shared import attachment
from elastable.embedding_store.wire.shared.sealed_memory import Extent, SealedMemory
from elastable.embedding_store.wire.shared.shared_channel import SharedChannels
from elastable.embedding_store.wire.shared.version_board import WriteBoard

# Slabs in memory that other processes of the host may map and read


_RESERVE_TIMES = 8  # address space for growth, so that growing moves nothing
_LEAST_RESERVE = 16 << 20
_SHARED_PARTS = frozenset({"live", "index", "cells", "ids", "weights"})
"""What a lookup reads."""

_SMALL_PARTS = frozenset({"index"})
"""Some words for each table: not worth a descriptor."""

_SHARE_A_MEMORY = 64  # slabs
_WORTH_PAGES = 32  # of the 512 in a huge page: with fewer touched, one would hold mostly nothing


class SharedSlab(Slab):
    """A slab in sealed memory, which whoever is handed its descriptor can map to read; gone with the last of them.

    It never shrinks, so that a reader's mapping stays good.

    Args:
        extent: Its memory, which nothing else uses.
        growing: Called before it grows.
    """

    def __init__(
        self, extent: Extent, rows: int, columns: int, dtype: npt.DTypeLike, growing: Callable[[], None] = lambda: None
    ) -> None:
        """Raises `MemoryError` where the system refuses the memory."""
        self.extent = extent
        self._columns = columns
        self._dtype = np.dtype(dtype)
        self._growing = growing
        self._mapping = self._mapped(rows)
        self.array = self._mapping.view(rows, columns, self._dtype)
        self._huge = np.zeros(0, bool)

    @property
    def shape(self) -> tuple[int, int, str]:
        """Rows, columns and dtype: with the descriptor, all that a reader needs."""
        return len(self.array), self._columns, self._dtype.str

    def grow(self, rows: int) -> None:
        """Grows; a process that has mapped fewer rows can still read those."""
        if rows <= len(self.array):
            return
        self._growing()
        if self.bytes_of(rows) > self._mapping.reserve:
            self._mapping = self._mapped(rows)
        self.array = self._mapping.view(rows, self._columns, self._dtype)

    def make_huge(self) -> Iterator[None]:
        """Backs what is in use with huge pages, as rows are read at random; yields after each of them.

        The system does this by itself for anonymous memory only, unless its administrator says otherwise.

        Raises:
            OSError: the system cannot, or has no huge page free.
        """
        mapping, whole = self._mapping, self.bytes_of(len(self.array)) // HUGE_PAGE_BYTES
        done = np.zeros(whole, bool)
        done[: min(whole, len(self._huge))] = self._huge[:whole]
        self._huge = done
        for page in np.flatnonzero(~done).tolist():
            if mapping.resident_pages(page * HUGE_PAGE_BYTES) >= _WORTH_PAGES:
                mapping.collapse(page * HUGE_PAGE_BYTES)
                done[page] = True
                yield

    def _mapped(self, rows: int) -> FileMapping:
        size = self.bytes_of(rows)
        return self.extent.memory.mapped(self.extent, size, max(size * _RESERVE_TIMES, _LEAST_RESERVE))


class SharedSlabs:
    """The slabs of one store: a `SlabMaker` that counts what readers would have to map anew.

    A slab has a separate memory, and so a descriptor, which gives its pages back as soon as it is gone, while less
    than half of the descriptors that this process may have are in use. After that slabs share memories, 64 in each: the
    number of descriptors is bounded whatever the number of tables.

    Where not even those are to be had, a slab is in memory of this process alone, and so the rows of its table are read
    over gRPC.

    Attributes:
        generation: Counts slabs that were made or have grown.

    Raises:
        OSError: the system cannot share memory.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._made: list[weakref.ref[SharedSlab]] = []
        # Held from the beginning, so that there is one when descriptors have run out.
        self._common = [SealedMemory("rows", _SHARE_A_MEMORY)]
        self._warned = False

    def __call__(self, part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        if part not in _SHARED_PARTS:
            return anonymous_slab(part, rows, columns, dtype)
        self.changed()
        try:
            slab = SharedSlab(self._extent(part), rows, columns, dtype, self.changed)
        except OSError as error:
            _LOG.info("rows are in memory of this process alone: %s", error)
            return anonymous_slab(part, rows, columns, dtype)
        self._made.append(weakref.ref(slab, self._made.remove))
        return slab

    def changed(self) -> None:
        """Something is to be mapped anew."""
        self.generation += 1

    def alive(self) -> list[SharedSlab]:
        """All slabs that are still in use. May be called next to the thread that makes them."""
        return [slab for made in list(self._made) if (slab := made()) is not None]

    def _extent(self, part: str) -> Extent:
        """Raises `OSError` where there is no descriptor left."""
        if part not in _SMALL_PARTS and self._has_descriptors():
            extent = SealedMemory(part).extent()
        else:
            extent = next((found for memory in self._common if (found := memory.extent()) is not None), None)
        if extent is None:
            self._common.append(SealedMemory("rows", _SHARE_A_MEMORY))
            extent = self._common[-1].extent()
        assert extent is not None
        return extent

    def _has_descriptors(self) -> bool:
        """Whether less than half of them are in use: the lowest free one says so."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            lowest = os.dup(self._common[0].fd)
            os.close(lowest)
        except OSError:  # all are in use
            lowest = most
        if most == resource.RLIM_INFINITY or lowest < most // 2:
            return True
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "half or more of the %d descriptors that this process may have (ulimit -n) are in use: further tables "
                "share memories, which keep what a dropped table held; for tables beyond them raise the limit",
                most,
            )
        return False


# The server that passes the memory of a store to processes of the same host; see `attachment`


_ANSWER_S = 2.0
_BACKLOG = 64
_SHARE = 16  # of all descriptors, for attached processes; a channel takes two
_MOST = 1024

LaidOut = tuple[attachment.TableLayout, list[SharedSlab]]
"""A table, and the slabs of its directory and then of its values."""

StoreLayout = tuple[int, list[LaidOut]]
"""The generation, and the tables that can be attached."""


class AttachmentServer:
    """Listens from construction to `close`, in a separate thread.

    Args:
        board: Descriptor of the store's version board.
        layout: Returns the current layout of the store, with the slabs, which stay mapped as long as they are held.

    Attributes:
        name: Of the socket, in the abstract namespace.
        token: The secret that a process must send; it is given over gRPC only.
        most: The most processes that may be attached at once, and the most channels: a share of the descriptors that
            this process may have. Further processes use gRPC.
        channels: The channels that processes have passed to this one.

    Raises:
        OSError: the system has no such sockets.
    """

    def __init__(self, board: int, layout: Callable[[], StoreLayout]) -> None:
        self.name = f"elastable-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(attachment.TOKEN_BYTES)
        self.channels = SharedChannels()
        self._board = board
        self._layout = layout
        self._subscribers: tuple[socket.socket, ...] = ()
        self._senders: dict[socket.socket, int] = {}
        self._visitors: dict[socket.socket, float] = {}  # came, have said nothing yet, and until when they may
        self._waiting = selectors.DefaultSelector()  # with what is done once a socket has something to read
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = _MOST if limit == resource.RLIM_INFINITY else max(4, min(_MOST, limit // _SHARE))
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        # Closing a socket does not wake who waits for it; a byte to this pair does.
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="elastable-attach", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Whether any process is."""
        return bool(self._subscribers)

    def notify(self) -> None:
        """Tells all attached processes that something has changed; waits for none of them."""
        for subscriber in self._subscribers:
            # A full buffer holds unread notifications; the thread notices closed connections.
            with suppress(OSError):
                subscriber.send(b".", socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Closes all connections. Closing twice is harmless."""
        with suppress(OSError):
            self._wake.send(b".")
        self._thread.join(_ANSWER_S * 2)
        self._wake.close()

    def _serve(self) -> None:
        with self._waiting as waiting:
            waiting.register(self._woken, selectors.EVENT_READ)
            waiting.register(self._listener, selectors.EVENT_READ, lambda _: self._let_in())
            while True:
                ready = {key.fileobj: key.data for key, _ in waiting.select(_ANSWER_S if self._visitors else 60.0)}
                if self._woken in ready:
                    break
                now = time.monotonic()
                for late in [visitor for visitor, until in self._visitors.items() if until < now]:
                    ready.setdefault(late, self._hang_up)
                # Who goes first: there is room for who comes then.
                for end in sorted(ready, key=lambda end: (end is self._listener, end in self._visitors)):
                    ready[end](end)
        for end in (self._listener, self._woken, *self._subscribers, *self._senders, *self._visitors):
            end.close()
        if self._spare >= 0:
            os.close(self._spare)
        self._subscribers = ()
        self._senders, self._visitors = {}, {}
        self.channels.close()

    def _let_in(self) -> None:
        """Accepts one connection; its request is read once it arrives."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(error)
            return
        try:
            attachment.require_known_user(connection)
            if len(self._visitors) >= self.most:
                raise OSError(f"{self.most} processes are connecting already")
            self._wait_for(connection, self._answer)
        except (OSError, BadInput) as error:
            _LOG.warning("a process was refused: %s", error)
            connection.close()
            return
        self._visitors[connection] = time.monotonic() + _ANSWER_S

    def _wait_for(self, connection: socket.socket, do: Callable[[socket.socket], None]) -> None:
        connection.setblocking(False)
        self._waiting.register(connection, selectors.EVENT_READ, do)

    def _turn_away(self, error: OSError) -> None:
        """No descriptor is left: closes the connection with the spare one, else it would be reported for ever."""
        _LOG.warning("a process cannot attach: %s; raise the limit of descriptors (ulimit -n)", error)
        if self._spare >= 0:
            os.close(self._spare)
        self._spare = -1
        with suppress(OSError):
            self._listener.accept()[0].close()
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _answer(self, connection: socket.socket) -> None:
        """Answers the request of an accepted process."""
        del self._visitors[connection]
        self._waiting.unregister(connection)
        handed: list[int] = []
        try:
            said, handed, _, _ = socket.recv_fds(connection, attachment.TOKEN_BYTES + 1, 1)
            connection.settimeout(_ANSWER_S)
            token, wish = said[:-1], said[-1:]
            if not hmac.compare_digest(token, self.token):
                wish = b""
            if wish == attachment.CHANNEL and handed:
                self._take_channel(connection, handed.pop(0))
                return
            if wish == attachment.NOTIFICATIONS:
                self._subscribe(connection)
                return
            if wish == attachment.LAYOUT:
                self._send_layout(connection)
        except OSError as error:
            _LOG.info("a process could not attach: %s", error)
        finally:
            for descriptor in handed:  # a buffer for one descriptor has room for two
                os.close(descriptor)
        connection.close()

    def _subscribe(self, connection: socket.socket) -> None:
        """Raises `OSError` if there are too many, or the process is gone."""
        if len(self._subscribers) >= self.most:
            raise OSError(f"{self.most} processes are attached, as many as descriptors (ulimit -n) are reserved for")
        attachment.send_packet(connection, {"board": True}, [self._board])
        self._wait_for(connection, self._hang_up)
        self._subscribers = (*self._subscribers, connection)

    def _take_channel(self, connection: socket.socket, descriptor: int) -> None:
        """Raises `OSError` for memory that is no channel, one channel too many, or a sender that is gone."""
        if len(self._senders) >= self.most:
            os.close(descriptor)
            raise OSError(
                f"{self.most} shared-memory channels are open, as many as descriptors (ulimit -n) are reserved for"
            )
        number = self.channels.add(descriptor)
        try:
            attachment.send_packet(connection, {attachment.CHANNEL_NUMBER: number})
            self._wait_for(connection, self._hang_up)
        except OSError:
            self.channels.drop(number)
            raise
        self._senders[connection] = number

    def _send_layout(self, connection: socket.socket) -> None:
        generation, tables = self._layout()
        attachment.send_packet(connection, {"generation": generation, "tables": len(tables)})
        for table, slabs in tables:
            if len(slabs) > attachment.TABLE_SLABS:
                raise OSError(
                    f"table {table.spec.name!r} has {len(slabs)} slabs; a packet takes {attachment.TABLE_SLABS}"
                )
            attachment.send_packet(connection, attachment.table_to_packet(table), memories_of(slabs))

    def _hang_up(self, connection: socket.socket) -> None:
        """An attached process has ended, or detached: that is the only thing it may say; or one said nothing at all."""
        self._waiting.unregister(connection)
        self._visitors.pop(connection, None)
        self._subscribers = tuple(other for other in self._subscribers if other is not connection)
        if connection in self._senders:
            self.channels.drop(self._senders.pop(connection))
        connection.close()


def shapes_of(slabs: Sequence[SharedSlab]) -> tuple[attachment.SlabShape, ...]:
    """The shapes of a table's slabs, for a layout."""
    memories = memories_of(slabs)
    return tuple(
        attachment.SlabShape(*slab.shape, memories.index(slab.extent.memory.fd), slab.extent.offset) for slab in slabs
    )


def memories_of(slabs: Sequence[SharedSlab]) -> list[int]:
    """The descriptors of the memories in which a table's slabs lie, each once."""
    return list(dict.fromkeys(slab.extent.memory.fd for slab in slabs))


_HUGE_EVERY_S = 1.0
_HUGE_GROWTH, _HUGE_LATEST_S = 4.0, 64.0
_NONE_FREE = frozenset({errno.EAGAIN, errno.EBUSY, errno.ENOMEM})
"""No huge page now; there may be one later."""
_HUGE_PAUSE_S = 0.002
_END_S = 5.0
_LOG = logging.getLogger(__name__)


class SharedMemoryStore(MemoryStore):
    """A `MemoryStore` whose memory other processes of the host can attach (`SharedSource`).

    Rows lie in memory with descriptors and without names, so that nothing is left of them when the last process that
    has them mapped is gone, however it ended. Readers in other processes take no lock: a board tells them whether what
    they have read was one state.

    Raises:
        OSError: the system has no memfd or no abstract sockets (it is not Linux).
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        direct_bytes: int | None = None,
        before_image_bytes: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(threads, direct_bytes=direct_bytes, before_image_bytes=before_image_bytes, timeout_s=timeout_s)
        self.new_slab = self._slabs = SharedSlabs()
        self._board = WriteBoard()
        self._announced_generation = self._slabs.generation
        self._laid_out: dict[str, tuple[MemoryTable, bool]] = {}
        self._lock = _AnnouncedLock(timeout_s, "the memory store", self._board.begin, self._announce)
        self.attachments = AttachmentServer(self._board.fd, self._layout)
        self._closing = threading.Event()
        self._tidier = threading.Thread(target=self._tidy, name="elastable-huge-pages", daemon=True)
        self._tidier.start()

    @property
    def channels(self) -> SharedChannels:
        """What processes of this host have to send, where they have handed their memory over."""
        return self.attachments.channels

    def make_huge(self) -> None:
        """Moves the rows that there are to huge pages now; a thread of the store does so by and by.

        Raises:
            OSError: the system cannot, or has none free.
        """
        for _ in self._huge_pages():
            pass

    def _huge_pages(self) -> Iterator[None]:
        return chain.from_iterable(slab.make_huge() for slab in self._slabs.alive())

    def close(self) -> None:
        """Closes the store; readers notice it and go on over gRPC."""
        if not self._closing.is_set():
            self._closing.set()
            self._tidier.join(_END_S)
            super().close()
            self.attachments.close()
            self._board.close()

    def _show_ahead(self, version: int) -> bool:
        if not self.attachments.attached:
            return False
        if self._slabs.generation != self._announced_generation or self._lies() != self._laid_out:
            return False  # readers have to ask where rows lie now, which waits for the lock
        self._board.ahead(version)
        self.attachments.notify()
        return True

    def _announce(self) -> None:
        """Ends a change, on the board and at the attachments; the lock is held.

        What could not be logged, or broke off in the middle, stays a change that has not ended: nobody reads such rows.
        Where they were shown ahead, they are not any more.
        """
        if self.broke_off:
            self._board.begin()
            return
        laid_out = self._lies()
        if laid_out != self._laid_out:
            self._slabs.changed()
            self._laid_out = laid_out
        self._announced_generation = self._slabs.generation
        self._board.end(self.version(), self._announced_generation)
        self.attachments.notify()

    def _lies(self) -> dict[str, tuple[MemoryTable, bool]]:
        """Of every table: whether not all of it is in shared memory."""
        return {name: (table, table.reading_slabs() is None) for name, table in self.memory_tables.items()}

    def _layout(self) -> StoreLayout:
        with self._lock.reading():
            found = [_laid_out(table) for table in self.memory_tables.values()]
            return self._slabs.generation, [table for table in found if table is not None]

    def _tidy(self) -> None:
        """Looks after pages until the store is closed, a little at a time."""
        pause = _HUGE_EVERY_S
        while not self._closing.wait(pause):
            try:
                for _ in self._huge_pages():
                    if self._closing.wait(_HUGE_PAUSE_S):
                        return
            except OSError as error:
                _LOG.info("rows stay on small pages: %s", error)
                if error.errno not in _NONE_FREE:
                    return
                # Each attempt has the system look for two free megabytes, which is not for nothing.
                pause = min(_HUGE_GROWTH * pause, _HUGE_LATEST_S)
            else:
                pause = _HUGE_EVERY_S


def channels_of(store: EmbeddingStore) -> SharedChannels | None:
    """What processes of this host have to send to whoever owns `store`; None where it shares no memory with them."""
    return store.channels if isinstance(store, SharedMemoryStore) else None


class _AnnouncedLock(ReadersWriterLock):
    """A lock that says when a writer begins, and when it has ended."""

    def __init__(self, timeout_s: float, name: str, begun: Callable[[], None], ended: Callable[[], None]) -> None:
        super().__init__(timeout_s, name)
        self._begun = begun
        self._ended = ended

    @contextmanager
    def writing(self) -> Iterator[None]:
        with super().writing():
            self._begun()
            try:
                yield
            finally:
                self._ended()


def _laid_out(table: MemoryTable) -> LaidOut | None:
    """The layout of a table; None where not all of it is in shared memory."""
    slabs = table.reading_slabs()
    if slabs is None:
        return None
    directory = [slab for slab in slabs[0] if isinstance(slab, SharedSlab)]
    values = [slab for slab in slabs[1] if isinstance(slab, SharedSlab)]
    if (len(directory), len(values)) != (len(slabs[0]), len(slabs[1])):
        return None
    shapes = shapes_of(directory + values)
    behind = len(directory)
    return attachment.TableLayout(table.spec, table.direct, shapes[:behind], shapes[behind:]), directory + values
