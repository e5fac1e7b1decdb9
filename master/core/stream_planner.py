"""Plans a job on a stream of events while it runs: a thread that asks the stream what waits."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.master.api import EventSource, StreamStatus
from elastable.master.master_options import MasterOptions, Until
from elastable.master.tasks.stream_schedule import StreamSchedule
from elastable.master.tasks.task_board import TaskBoard

_log = logging.getLogger(__name__)

_AHEAD = 16  # versions that are planned beyond the current one
_TURN_S = 0.05  # between two looks at the schedule
_EVERY_S = 1.0  # lag is asked for, and positions are told, as often at least
_JOIN_S = 5.0


class StreamPlanner:
    """Keeps the schedule of a job on a stream ahead of its workers.

    Args:
        changing: Around every look at the schedule and every change of it: the master's lock.
        extended: Called within it when there is more to do, or nothing any more.
        version, logged: The current version, and the one that the store has logged: of that the stream is told.

    Raises:
        BadInput: an earlier run of the job ends elsewhere.
    """

    def __init__(
        self,
        schedule: StreamSchedule,
        board: TaskBoard,
        source: EventSource,
        options: MasterOptions,
        version: Callable[[], int],
        logged: Callable[[], int],
        changing: Callable[[], AbstractContextManager[None]],
        extended: Callable[[], None],
    ) -> None:
        self._schedule, self._board, self._source = schedule, board, source
        self._options, self._until = options, Until.parse(options.until)
        if schedule.until is not None and schedule.option != options.until:
            given = "no --until" if options.until is None else f"--until {options.until}"
            raise BadInput(
                f"the job that is resumed ends at --until {schedule.option}, and {given} is given: give that one; or "
                "let it end, and begin another with another end that continues from it (--continue-from)"
            )
        schedule.option = options.until
        self._logged, self._version, self._changing, self._extended = logged, version, changing, extended
        self._noted = self._looked = -_EVERY_S
        self._look_again = 0.0  # no earlier is the stream asked for more events
        self._away_since, self._away, self._identified = 0.0, "", False
        self._over = threading.Event()
        self._lag_events, self._since = 0, float("inf")

    def status(self) -> StreamStatus:
        """How far the job is behind the stream, as of the last second."""
        lag_s = max(0.0, time.time() - self._since) if self._lag_events else 0.0
        return StreamStatus(self._lag_events, lag_s, self._schedule.bad_events, self._away)

    @contextmanager
    def running(self, fail: Callable[[BaseException], None]) -> Iterator[None]:
        """Plans in a thread; `fail` is called with what makes that impossible."""

        def run() -> None:
            try:
                while not self._over.wait(0 if self._look() else _TURN_S):
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
            self._away = str(error)
            if not self._away_since:
                self._away_since = time.monotonic()
                _log.warning("the stream is away, trying again: %s", error)
            if time.monotonic() - self._away_since > self._options.commit_deadline_s:
                raise
            return False
        self._away_since, self._away = 0.0, ""
        return planned

    def _identify(self, known: Collection[str]) -> None:
        """Raises `BadInput` where positions of `known` partitions are of another stream, of the run before."""
        before, now = self._schedule.identity, self._source.identity()
        if known and before not in ("", now):
            raise BadInput(
                f"the job goes on behind events of {before} in {min(known)}, and its reader is of {now or 'another'}: "
                "read from that one, or begin with the rows alone (--warm-start)"
            )
        with self._changing():
            self._schedule.identity = now
        self._identified = True

    def _plan(self) -> bool:
        with self._changing():
            most = self._schedule.wanted(self._version(), _AHEAD)
            positions = dict(self._schedule.point.positions)
        now = time.monotonic()
        if now < self._look_again if most else now - self._looked < _EVERY_S:
            return False
        until = self._bound()
        self._looked, waiting = now, self._source.ahead(positions, max(1, most), until)
        if not self._identified:
            self._identify(positions.keys() & waiting.keys())
        self._since = min((each.since for each in waiting.values() if each.since is not None), default=self._since)
        with self._changing():
            self._schedule.until = until
            planned_before = self._schedule.events_from(self._version())
            self._lag_events = planned_before + sum(each.lag for each in waiting.values())
            planned = bool(most) and self._schedule.plan(waiting, now, self._options.linger_s)
            if planned:
                self._board.extend()
                self._extended()
        self._look_again = 0.0 if planned else now + self._source.look_s
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
        if time.monotonic() - self._noted < _EVERY_S:
            return
        self._noted = time.monotonic()
        with self._changing():
            positions = dict(self._schedule.positions(self._logged()))
        self._source.committed(positions)
