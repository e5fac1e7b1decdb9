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

from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.range_pool import SERIAL, RangePool, available_cores
from elastable.embedding_store.tables import LookupRequest, answer_requests
from elastable.embedding_store.wire.shared.attached_rows import AttachedTable, Torn, attached_tables
from elastable.embedding_store.wire.shared.attachment import NOTIFICATIONS, connected, receive_packet
from elastable.embedding_store.wire.shared.version_board import Notice, ReadBoard

__all__ = ["Attachment", "Detached"]

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
