"""The rows of the next micro-batch, looked up while the one before it is computed."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.errors import FutureVersion, Unavailable
from elastable.master.api import Task, TaskKind
from elastable.worker.runtime.compute import Prepared

__all__ = ["RowsAhead", "source_for"]

#: How long a lookup waits for its version at the source; longer waits are the worker's own.
_WAIT_S = 1.0
_IDLE_S = 1.0

Rows = dict[str, Float32]


def source_for(source: RowSource, task: Task) -> RowSource:
    """The source as a task reads it: evaluation leaves caches as they are."""
    return source if task.kind is TaskKind.TRAIN else source.unpromoted()


class RowsAhead:
    """Looks up at most one synchronous micro-batch ahead, in a thread of its own.

    The rows are those of the micro-batch's own version: where that is yet to be committed, the lookup waits at the
    source. So they are on their way while the dense part of the version is.

    Args:
        source: Where rows are looked up.
        deadline_s: How long a lookup under way is waited for.
    """

    def __init__(self, source: RowSource, deadline_s: float) -> None:
        self._source = source
        self._deadline_s = deadline_s
        self._asked: Prepared | None = None
        self._rows: Future[Rows] = Future()
        self._rows.set_result({})
        self._waiting: SimpleQueue[tuple[Prepared, Future[Rows]]] = SimpleQueue()
        self._closed = False
        # A daemon: a lookup that waits for a master that is gone must not keep the process.
        self._thread = threading.Thread(target=self._run, name="elastable-rows-ahead", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def begin(self, following: Prepared | None) -> None:
        """Starts the lookup of a micro-batch; no more than one is under way."""
        if following is None or following is self._asked or not following.ids.unique or not self._rows.done():
            return
        self._asked, self._rows = following, Future()
        self._waiting.put((following, self._rows))

    def take(self, prepared: Prepared) -> Rows | None:
        """The rows of a micro-batch whose version is committed; None: they are yet to be looked up.

        Raises:
            ElastableError: what the lookup failed with.
        """
        if prepared is not self._asked:
            return None
        self._asked = None
        try:
            return self._rows.result(timeout=self._deadline_s + _WAIT_S)
        except (FutureVersion, Unavailable, TimeoutError):
            return None  # now that the version is there, or with more patience, it may succeed

    def forget(self) -> None:
        """What is looked up is of another master's store, perhaps: it is not used."""
        self._asked = None

    def close(self) -> None:
        """Lets the thread end."""
        self._closed = True

    def _run(self) -> None:
        while not self._closed:
            try:
                prepared, rows = self._waiting.get(timeout=_IDLE_S)
            except Empty:
                continue
            try:
                source = source_for(self._source, prepared.task)
                rows.set_result(source.lookup_when(prepared.ids.unique, prepared.task.version, _WAIT_S))
            except Exception as error:  # noqa: BLE001 - whoever takes the rows gets it
                rows.set_exception(error)
