"""A memory store whose rows other processes of the host read for themselves."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore, MemoryTable
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.wire.shared.attachment import TableLayout
from elastable.embedding_store.wire.shared.attachment_server import AttachmentServer, LaidOut, StoreLayout, shapes_of
from elastable.embedding_store.wire.shared.shared_channel import SharedChannels
from elastable.embedding_store.wire.shared.shared_slab import SharedSlab, SharedSlabs
from elastable.embedding_store.wire.shared.version_board import WriteBoard

__all__ = ["SharedMemoryStore", "channels_of"]

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

    Args:
        threads, direct_bytes, before_image_bytes, timeout_s: As of `MemoryStore`.

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
        self._lock = _AnnouncedLock(timeout_s, "the memory store", self._begin_change, self._announce)
        self._attachments = AttachmentServer(self._board.fd, self._layout)
        self._closing = threading.Event()
        self._tidier = threading.Thread(target=self._tidy, name="elastable-huge-pages", daemon=True)
        self._tidier.start()

    @property
    def attachments(self) -> AttachmentServer:
        """The server that passes the memory to other processes."""
        return self._attachments

    @property
    def channels(self) -> SharedChannels:
        """What processes of this host have to send, where they have handed their memory over."""
        return self._attachments.channels

    def make_huge(self) -> None:
        """Moves the rows that there are to huge pages now; a thread of the store does so by and by.

        Raises:
            OSError: the system cannot, or has none free.
        """
        for slab in self._slabs.alive():
            for _ in slab.make_huge():
                pass

    def close(self) -> None:
        """Closes the store; readers notice it and go on over gRPC."""
        if not self._closing.is_set():
            self._closing.set()
            self._tidier.join(_END_S)
            super().close()
            self._attachments.close()
            self._board.close()

    def _begin_change(self) -> None:
        """Begins a change on the board; the lock is held."""
        self._board.begin()

    def _show_ahead(self, version: int) -> bool:
        if not self._attachments.attached:
            return False
        if self._slabs.generation != self._announced_generation or self._lies() != self._laid_out:
            return False  # readers have to ask where rows lie now, which waits for the lock
        self._board.ahead(version)
        self._attachments.notify()
        return True

    def _announce(self) -> None:
        """Ends a change, on the board and at the attachments; the lock is held.

        What could not be logged, or broke off in the middle, stays a change that has not ended: nobody reads such rows.
        Where they were shown ahead, they are not any more.
        """
        if self._unlogged is not None or self._failure is not None:
            self._board.begin()
            return
        laid_out = self._lies()
        if laid_out != self._laid_out:
            self._slabs.changed()
            self._laid_out = laid_out
        self._announced_generation = self._slabs.generation
        self._board.end(self._version, self._announced_generation)
        self._attachments.notify()

    def _lies(self) -> dict[str, tuple[MemoryTable, bool]]:
        """Of every table: whether not all of it is in shared memory."""
        return {name: (table, table.reading_slabs() is None) for name, table in self._tables.items()}

    def _layout(self) -> StoreLayout:
        with self._lock.reading():
            found = [_laid_out(table) for table in self._tables.values()]
            return self._slabs.generation, [table for table in found if table is not None]

    def _tidy(self) -> None:
        """Looks after pages until the store is closed, a little at a time."""
        pause = _HUGE_EVERY_S
        while not self._closing.wait(pause):
            try:
                for slab in self._slabs.alive():
                    for _ in slab.make_huge():
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
    """How a table lies; None where not all of it is in shared memory."""
    lies = table.reading_slabs()
    if lies is None:
        return None
    directory = [slab for slab in lies[0] if isinstance(slab, SharedSlab)]
    values = [slab for slab in lies[1] if isinstance(slab, SharedSlab)]
    if (len(directory), len(values)) != (len(lies[0]), len(lies[1])):
        return None
    shapes = shapes_of(directory + values)
    behind = len(directory)
    return TableLayout(table.spec, table.direct, shapes[:behind], shapes[behind:]), directory + values
