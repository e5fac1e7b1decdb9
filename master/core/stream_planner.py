"""Plans a job on a stream of events while it runs: a thread that asks the stream what waits."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from elastable.embedding_store.errors import Unavailable
from elastable.master.api import EventSource, Waiting
from elastable.master.master_options import MasterOptions, Until
from elastable.master.tasks.stream_schedule import StreamSchedule
from elastable.master.tasks.task_board import TaskBoard

_log = logging.getLogger(__name__)

_AHEAD = 16  # versions that are planned beyond the current one
_LOOK_EVERY_S = 0.05
_NOTE_EVERY_S = 1.0
_JOIN_S = 5.0


class StreamPlanner:
    """Keeps the schedule of a job on a stream ahead of its workers.

    Args:
        changing: Around every look at the schedule and every change of it: the master's lock.
        extended: Called within it when there is more to do, or nothing any more.
    """

    def __init__(
        self,
        schedule: StreamSchedule,
        board: TaskBoard,
        source: EventSource,
        options: MasterOptions,
        version: Callable[[], int],
        changing: Callable[[], AbstractContextManager[None]],
        extended: Callable[[], None],
    ) -> None:
        self._schedule, self._board, self._source = schedule, board, source
        self._options, self._until = options, Until.parse(options.until)
        self._version, self._changing, self._extended = version, changing, extended
        self._noted, self._away_since = -_NOTE_EVERY_S, 0.0
        self._over = threading.Event()
        self.waiting: Mapping[str, Waiting] = {}

    @contextmanager
    def running(self, fail: Callable[[BaseException], None]) -> Iterator[None]:
        """Plans in a thread; `fail` is called with what makes that impossible."""

        def run() -> None:
            try:
                while not self._over.wait(0 if self._look() else _LOOK_EVERY_S):
                    pass
            except BaseException as error:  # noqa: BLE001 - whatever a reader raises ends the job
                fail(error)

        thread = threading.Thread(target=run, name="elastable-stream-planner", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_JOIN_S)

    def _look(self) -> bool:
        """Plans what waits; whether there may be more to plan at once.

        Raises:
            Unavailable: the stream has been away for longer than commits are retried.
        """
        try:
            planned = self._plan()
            self._note()
        except Unavailable as error:
            if not self._away_since:
                self._away_since = time.monotonic()
                _log.warning("the stream is away, trying again: %s", error)
            if time.monotonic() - self._away_since > self._options.commit_deadline_s:
                raise
            return False
        self._away_since = 0.0
        return planned

    def _plan(self) -> bool:
        until = self._bound()
        with self._changing():
            most = self._schedule.wanted(self._version(), _AHEAD)
            positions = dict(self._schedule.point.positions)
        if not most:
            return False
        waiting = self._source.ahead(positions, most, until)
        with self._changing():
            self._schedule.until = until
            planned = self._schedule.plan(waiting, time.monotonic(), self._options.linger_s)
            self.waiting = waiting
            if planned:
                self._board.extend()
                self._extended()
        return planned

    def _bound(self) -> Mapping[str, str] | None:
        """Where the stream ends for this job; None: that is not known yet, or it never does."""
        if self._schedule.until is not None or self._until.positions is not None:
            return self._until.positions if self._schedule.until is None else self._schedule.until
        if self._until.end:
            return self._source.ends()
        moment = self._until.time
        return None if moment is None or moment > time.time() else self._source.ends(moment)

    def _note(self) -> None:
        """Tells the stream which events are in a committed version, now and then."""
        if time.monotonic() - self._noted < _NOTE_EVERY_S:
            return
        self._noted = time.monotonic()
        with self._changing():
            positions = dict(self._schedule.positions(self._version()))
        self._source.committed(positions)
