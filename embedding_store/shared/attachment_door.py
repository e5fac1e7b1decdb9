"""Where processes of the same host get the memory of a store: the owner's side of `attachment`."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from elastable.embedding_store.shared.attachment import (
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
from elastable.embedding_store.shared.outbox import Outboxes
from elastable.embedding_store.shared.slab import SharedSlab

__all__ = ["AttachmentDoor", "LaidOut", "StoreLayout"]

_ANSWER_S = 2.0
_BACKLOG = 64
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
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(_ANSWER_S)
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
                ready = [key.fileobj for key, _ in waiting.select(timeout=60.0)]
                if self._woken in ready:
                    break
                for other in [other for other in (*self._bells, *self._senders) if other in ready]:
                    self._hang_up(waiting, other)
                if self._listener in ready:
                    self._answer(waiting)
        for end in (self._listener, self._woken, *self._bells, *self._senders):
            end.close()
        self._bells = ()
        self._senders = {}
        self.outboxes.close()

    def _answer(self, waiting: selectors.BaseSelector) -> None:
        """One process that came to the door."""
        try:
            connection, _ = self._listener.accept()
            connection.settimeout(_ANSWER_S)
        except OSError:
            return
        try:
            said, handed, _, _ = socket.recv_fds(connection, TOKEN_BYTES + 1, 1)
            token, wish = said[:-1], said[-1:]
            if not hmac.compare_digest(token, self.token):
                wish = b""
            if handed and wish != OUTBOX:
                os.close(handed[0])
            if wish == OUTBOX and handed:
                self._take_outbox(waiting, connection, handed[0])
                return
            if wish == BELL:
                send_packet(connection, {"board": True}, [self._board])
                connection.setblocking(False)
                waiting.register(connection, selectors.EVENT_READ)
                self._bells = (*self._bells, connection)
                return
            if wish == LAYOUT:
                self._send_layout(connection)
        except OSError as error:
            _LOG.info("a process could not attach: %s", error)
        connection.close()

    def _take_outbox(self, waiting: selectors.BaseSelector, connection: socket.socket, descriptor: int) -> None:
        """Raises `OSError` for what is no outbox, or a sender that is gone again."""
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
            descriptors: list[int] = []
            try:
                descriptors.extend(_to_read(slab.fd) for slab in slabs)
                send_packet(connection, table_to_packet(table), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _hang_up(self, waiting: selectors.BaseSelector, bell: socket.socket) -> None:
        """An attached process has ended, or detached: they say nothing else."""
        waiting.unregister(bell)
        self._bells = tuple(other for other in self._bells if other is not bell)
        if bell in self._senders:
            self.outboxes.drop(self._senders.pop(bell))
        bell.close()


def shape_of(slab: SharedSlab) -> SlabShape:
    """The shape of a slab, for a layout."""
    return SlabShape(*slab.shape)


def _to_read(descriptor: int) -> int:
    """The same memory by a descriptor that cannot be written through, where the system has a /proc."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.dup(descriptor)
