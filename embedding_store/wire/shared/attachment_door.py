"""Where processes of the same host get the memory of a store: the owner's side of `attachment`."""

from __future__ import annotations

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
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.shared.attachment import (
    BELL,
    LAYOUT,
    OUTBOX,
    TABLE_SLABS,
    TOKEN_BYTES,
    SlabShape,
    TableLayout,
    send_packet,
    table_to_packet,
)
from elastable.embedding_store.wire.shared.outbox import Outboxes
from elastable.embedding_store.wire.shared.shared_slab import SharedSlab
from elastable.embedding_store.wire.shared.users import require_known_user

__all__ = ["AttachmentDoor", "LaidOut", "StoreLayout", "shapes_of"]

_ANSWER_S = 2.0
_BACKLOG = 64
_SHARE = 16  # of all descriptors, for attached processes; an outbox takes two
_MOST = 1024
_LOG = logging.getLogger(__name__)

LaidOut = tuple[TableLayout, list[SharedSlab]]
"""A table, and the slabs of its directory and then of its values."""

StoreLayout = tuple[int, list[LaidOut]]
"""The generation, and the tables that can be attached."""


class AttachmentDoor:
    """Listens from construction to `close`, in a thread of its own.

    Args:
        board: Descriptor of the store's board.
        layout: How the store lies now; it keeps its slabs as long as they are held.

    Attributes:
        name: Of the socket, in the abstract namespace.
        token: What a process must say, told over gRPC alone.
        most: Processes that may be attached at once, and as many that may have handed an outbox over: a share of
            the descriptors that this process may have. More read, and send, over gRPC.
        outboxes: What processes have handed over.

    Raises:
        OSError: the system has no such sockets.
    """

    def __init__(self, board: int, layout: Callable[[], StoreLayout]) -> None:
        self.name = f"elastable-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.outboxes = Outboxes()
        self._board = board
        self._layout = layout
        self._bells: tuple[socket.socket, ...] = ()
        self._senders: dict[socket.socket, int] = {}
        self._visitors: dict[socket.socket, float] = {}  # came, have said nothing yet, and until when they may
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

    def ring(self) -> None:
        """Tells all attached processes that something has changed; waits for none of them."""
        for bell in self._bells:
            # A full buffer holds rings that are yet to be heard; who hung up is seen to by the thread.
            with suppress(OSError):
                bell.send(b".", socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Hangs up everywhere. Closing twice is harmless."""
        with suppress(OSError):
            self._wake.send(b".")
        self._thread.join(_ANSWER_S * 2)
        self._wake.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            waiting.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in waiting.select(timeout=_ANSWER_S if self._visitors else 60.0)}
                if self._woken in ready:
                    break
                for other in [other for other in (*self._bells, *self._senders) if other in ready]:
                    self._hang_up(waiting, other)
                self._see_visitors(waiting, ready)
                if self._listener in ready:
                    self._let_in(waiting)
        for end in (self._listener, self._woken, *self._bells, *self._senders, *self._visitors):
            end.close()
        if self._spare >= 0:
            os.close(self._spare)
        self._bells = ()
        self._senders, self._visitors = {}, {}
        self.outboxes.close()

    def _let_in(self, waiting: selectors.BaseSelector) -> None:
        """One process that came to the door; what it wants is read when it comes."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(error)
            return
        try:
            require_known_user(connection)
            if len(self._visitors) >= self.most:
                raise OSError(f"{self.most} processes are at the door already")
            connection.setblocking(False)
            waiting.register(connection, selectors.EVENT_READ)
        except (OSError, BadInput) as error:
            _LOG.warning("a process was not let in: %s", error)
            connection.close()
            return
        self._visitors[connection] = time.monotonic() + _ANSWER_S

    def _turn_away(self, error: OSError) -> None:
        """No descriptor is left. With the spare one whoever came is sent away, and so not announced for ever."""
        _LOG.warning("a process cannot attach: %s; raise the limit of descriptors (ulimit -n)", error)
        if self._spare >= 0:
            os.close(self._spare)
        self._spare = -1
        with suppress(OSError):
            self._listener.accept()[0].close()
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _see_visitors(self, waiting: selectors.BaseSelector, ready: Container[object]) -> None:
        now = time.monotonic()
        for connection, until in list(self._visitors.items()):
            if connection in ready or until < now:
                del self._visitors[connection]
                waiting.unregister(connection)
                if connection in ready:
                    self._answer(waiting, connection)
                else:
                    connection.close()

    def _answer(self, waiting: selectors.BaseSelector, connection: socket.socket) -> None:
        """What a process says that was let in."""
        handed: list[int] = []
        try:
            said, handed, _, _ = socket.recv_fds(connection, TOKEN_BYTES + 1, 1)
            connection.settimeout(_ANSWER_S)
            token, wish = said[:-1], said[-1:]
            if not hmac.compare_digest(token, self.token):
                wish = b""
            if wish == OUTBOX and handed:
                self._take_outbox(waiting, connection, handed.pop(0))
                return
            if wish == BELL:
                self._take_bell(waiting, connection)
                return
            if wish == LAYOUT:
                self._send_layout(connection)
        except OSError as error:
            _LOG.info("a process could not attach: %s", error)
        finally:
            for descriptor in handed:  # the room for one is room for two
                os.close(descriptor)
        connection.close()

    def _take_bell(self, waiting: selectors.BaseSelector, connection: socket.socket) -> None:
        """Raises `OSError` where there are enough of them, or the process is gone again."""
        if len(self._bells) >= self.most:
            raise OSError(f"{self.most} processes are attached, as many as descriptors (ulimit -n) are set aside for")
        send_packet(connection, {"board": True}, [self._board])
        connection.setblocking(False)
        waiting.register(connection, selectors.EVENT_READ)
        self._bells = (*self._bells, connection)

    def _take_outbox(self, waiting: selectors.BaseSelector, connection: socket.socket, descriptor: int) -> None:
        """Raises `OSError` for what is no outbox, for one too many, or a sender that is gone again."""
        if len(self._senders) >= self.most:
            os.close(descriptor)
            raise OSError(f"{self.most} outboxes are here, as many as descriptors (ulimit -n) are set aside for")
        number = self.outboxes.add(descriptor)
        try:
            send_packet(connection, {"outbox": number})
            connection.setblocking(False)
            waiting.register(connection, selectors.EVENT_READ)
        except OSError:
            self.outboxes.drop(number)
            raise
        self._senders[connection] = number

    def _send_layout(self, connection: socket.socket) -> None:
        generation, tables = self._layout()
        send_packet(connection, {"generation": generation, "tables": len(tables)})
        for table, slabs in tables:
            if len(slabs) > TABLE_SLABS:
                raise OSError(f"table {table.spec.name!r} lies in {len(slabs)} slabs; a packet takes {TABLE_SLABS}")
            send_packet(connection, table_to_packet(table), memories_of(slabs))

    def _hang_up(self, waiting: selectors.BaseSelector, bell: socket.socket) -> None:
        """An attached process has ended, or detached: they say nothing else."""
        waiting.unregister(bell)
        self._bells = tuple(other for other in self._bells if other is not bell)
        if bell in self._senders:
            self.outboxes.drop(self._senders.pop(bell))
        bell.close()


def shapes_of(slabs: Sequence[SharedSlab]) -> tuple[SlabShape, ...]:
    """The shapes of a table's slabs, for a layout."""
    memories = memories_of(slabs)
    return tuple(SlabShape(*slab.shape, memories.index(slab.extent.memory.fd), slab.extent.offset) for slab in slabs)


def memories_of(slabs: Sequence[SharedSlab]) -> list[int]:
    """The descriptors of the memories in which a table's slabs lie, each once."""
    return list(dict.fromkeys(slab.extent.memory.fd for slab in slabs))
