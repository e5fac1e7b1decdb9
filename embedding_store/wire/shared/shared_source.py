"""Rows of a store in another process, read from its memory where that is on this host, else over gRPC."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import Unavailable, Unsupported
from elastable.embedding_store.tables import rows_request
from elastable.embedding_store.wire.messages.store_messages import require_wire_ids
from elastable.embedding_store.wire.remote_store import RemoteSource
from elastable.embedding_store.wire.shared.attachment_client import Attachment, Detached

__all__ = ["SharedSource"]

_LOOK_AGAIN_S = 5.0
_LOG = logging.getLogger(__name__)

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
        self._ahead = ahead
        self._threads = threads
        self._attachment: Attachment | None = None
        self._attaching = threading.Lock()
        self._look_again = 0.0
        self._told: str | None = None  # why rows are read over gRPC, as it was logged
        self._closed = False
        if required:
            try:
                self._attachment = self._attach()
            except Unavailable:
                raise
            except OSError as error:
                where = f"the memory of the store at {remote.address}"
                raise Unsupported(f"{where} cannot be attached: {error}; is it on this host?") from error

    @property
    def attached(self) -> bool:
        """Whether lookups go to the store's memory."""
        return self._attachment is not None

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
        if self._current() is None:
            return self._remote.lookup_when(ids, version, wait_s)  # which waits and looks up in one call
        return super().lookup_when(ids, version, wait_s)

    def forget(self) -> None:
        """Detaches: a new store may have other memory."""
        attachment = self._attachment
        if attachment is not None:
            self._leave(attachment)

    def close(self) -> None:
        """Detaches, and closes the connection. Closing twice is harmless."""
        with self._attaching:
            self._closed = True
            attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()
        self._remote.close()

    def _near(self, ask: Callable[[Attachment], Answer | None]) -> Answer | None:
        """What the attachment answers; None where there is none, or it does not know."""
        attachment = self._current()
        if attachment is None:
            return None
        try:
            return ask(attachment)
        except Detached:
            self._leave(attachment)
            # Whatever was to be waited for: a store that is gone for good is to be missed within the deadline.
            self._remote.version()
            return None

    def _current(self) -> Attachment | None:
        """The attachment, made now where it is time to try."""
        if self._attachment is not None or self._closed or time.monotonic() < self._look_again:
            return self._attachment
        with self._attaching:
            if self._attachment is None and not self._closed and time.monotonic() >= self._look_again:
                self._look_again = time.monotonic() + _LOOK_AGAIN_S
                try:
                    self._attachment = self._attach()
                    self._told = None
                    _LOG.info("rows of the store at %s are read from its memory", self._remote.address)
                except Unavailable:
                    raise
                except (OSError, Unsupported) as error:
                    if str(error) != self._told:  # it is tried again every few seconds
                        self._told = str(error)
                        _LOG.info("rows of the store at %s are read over gRPC: %s", self._remote.address, error)
        return self._attachment

    def _attach(self) -> Attachment:
        name, token = self._remote.attach()
        return Attachment(name, token, self._threads, self._ahead)

    def _leave(self, attachment: Attachment) -> None:
        """The owner is gone, or has closed its store."""
        with self._attaching:
            if self._attachment is attachment:
                self._attachment = None
                self._look_again = 0.0
        attachment.close()
