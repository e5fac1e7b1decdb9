"""Prefetches the rows of the next micro-batch while the current one is computed."""

import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.errors import FutureVersion, Unavailable
from elastable.embedding_store.measures import span
from elastable.worker.runtime.compute import Prepared
from elastable.worker.runtime.worker_measures import trace_of

#: Seconds a lookup waits for its version at the source; the worker itself retries for longer.
_WAIT_S = 1.0
_IDLE_S = 1.0

Rows = dict[str, Float32]


class RowsAhead:
    """Looks up at most one synchronous micro-batch ahead, in a separate thread.

    The rows are those of the micro-batch's version; if that is not committed yet, the lookup waits at the source. So
    rows and dense part of a version are transferred at the same time.

    Args:
        deadline_s: Seconds to wait for a running lookup.
        job: Whose traces its lookups belong to.
    """

    def __init__(self, source: RowSource, deadline_s: float, job: str = "") -> None:
        self._job = job
        self._source = source
        self._deadline_s = deadline_s
        self._asked: Prepared | None = None
        self._rows: Future[Rows] = Future()
        self._rows.set_result({})
        self._waiting: SimpleQueue[tuple[Prepared, Future[Rows]]] = SimpleQueue()
        self._closed = False
        # A daemon: a lookup that waits for a lost master must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="elastable-rows-ahead", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def begin(self, following: Prepared | None) -> None:
        """Starts the lookup of a micro-batch, unless one is still running."""
        if following is None or following is self._asked or not following.ids.unique or not self._rows.done():
            return
        self._asked, self._rows = following, Future()
        self._waiting.put((following, self._rows))

    def take(self, prepared: Prepared) -> Rows | None:
        """The rows of a micro-batch whose version is committed; None: look them up.

        Raises:
            ElastableError: the error of the lookup.
        """
        if prepared is not self._asked:
            return None
        self._asked = None
        try:
            return self._rows.result(timeout=self._deadline_s + _WAIT_S)
        except (FutureVersion, Unavailable, TimeoutError):
            return None  # it may succeed once the version is committed, or with more retries

    def forget(self) -> None:
        """Discards the running lookup: its rows may come from another master's store."""
        self._asked = None

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True

    def _run(self) -> None:
        while not self._closed:
            try:
                prepared, rows = self._waiting.get(timeout=_IDLE_S)
            except Empty:
                continue
            task = prepared.task
            try:
                with span("lookup ahead", trace_of(self._job, task, task.version), {"micro_batch": task.micro_batch}):
                    found = self._source.lookup_when(prepared.ids.unique, task.version, _WAIT_S)
                rows.set_result(found)
            except Exception as error:  # noqa: BLE001 - whoever takes the rows gets it
                rows.set_exception(error)
