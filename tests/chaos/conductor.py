"""Runs one schedule: strikes when the job is where the schedule says, and compares how it ends."""

import contextlib
import json
import os
import resource
import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos.cluster import Cluster, Failed, Process
from tests.chaos.links import Link
from tests.chaos.schedules import Fault, Schedule
from tests.chaos.stores import PRIMARY_AND_REPLICA, REDIS_SERVERS, filled_in, forgets, in_files, lasts, redis_of
from tests.chaos.verdict import Ending, divergences, ending_of, store_differs

_UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
_LEAST_FULL_S = 0.2


def _kill(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    if fault.target in cluster.redis:
        cluster.redis[fault.target].pause_s = fault.seconds
        return cluster.redis[fault.target].signal(signal.SIGKILL) is not None
    process = _aimed_at(cluster, fault, at)
    if process is None:
        return False
    process.killed = True
    os.kill(process.pid, signal.SIGKILL)
    if process.role != "worker":
        cluster.start_again(process.role, process.number, fault.seconds)
    return True


def _stop(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    if fault.target in cluster.redis:
        pid = cluster.redis[fault.target].signal(signal.SIGSTOP)
    else:
        process = _aimed_at(cluster, fault, at)
        pid = None if process is None else process.pid
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
    if pid is None:
        return False
    cluster.timers.after(fault.seconds, lambda: _go_on(pid))
    return True


def _supersede(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    """The master stops, another one takes its place, and then the first one goes on as if nothing had happened."""
    process = _aimed_at(cluster, fault, at)
    if process is None or not process.at_work:
        return False
    process.superseded = process.killed = True
    os.kill(process.pid, signal.SIGSTOP)
    for link in cluster.links["worker-master"]:
        link.target = None
        link.cut()
    cluster.start(process.role, process.number)
    cluster.timers.after(fault.seconds, lambda: _go_on(process.pid))
    return True


def _fail(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    """The primary dies, and is away for longer than Sentinels wait."""
    assert cluster.redis_group is not None
    primary = cluster.redis_group.primary()
    return primary is not None and _kill(cluster, replace(fault, target=primary), None)


def _failover(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    """The replica becomes the primary while the primary serves."""
    assert cluster.redis_group is not None
    return cluster.redis_group.fail_over()


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _fill(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    """No file of the process may grow beyond a few bytes, as on a full disk.

    Of a file store's master every second time beyond what its files have: the
    limit is for whatever is written, so that a lower one is a disk that fails.
    """
    few = 37 * fault.number % 2_000
    if fault.target in cluster.redis:
        cluster.redis[fault.target].pause_s = fault.seconds
        return cluster.redis[fault.target].fill(few)
    process = _aimed_at(cluster, fault, at)
    if process is None:
        return False
    if fault.number % 2:
        few += max((file.stat().st_size for file in (cluster.home / "rows").rglob("*.rows")), default=0)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (few, resource.RLIM_INFINITY))

    def room() -> None:
        if process.pid in cluster.processes:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, _UNLIMITED)

    cluster.timers.after(max(_LEAST_FULL_S, fault.seconds), room)
    return True


def _cut(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    return sum(link.cut() for link in _links(cluster, fault)) > 0


def _delay(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    for link in _links(cluster, fault):
        link.delay(0.02 + 0.01 * (fault.number % 8), fault.seconds)
    return True


def _silence(cluster: Cluster, fault: Fault, at: Process | None) -> bool:
    for link in _links(cluster, fault):
        link.silence(fault.seconds)
    return True


def _aimed_at(cluster: Cluster, fault: Fault, at: Process | None) -> Process | None:
    """The process at the gate where it is of the right role, else the first that is."""
    if at is not None and at.name == fault.target and not at.killed:
        return at
    alive = (process for process in cluster.processes.values() if not process.killed)
    return next((process for process in alive if process.name == fault.target), None)


def _links(cluster: Cluster, fault: Fault) -> list[Link]:
    links = cluster.links[fault.target]
    return links if fault.number % 2 else links[:1]


_ALL = (_kill, _stop, _supersede, _fail, _failover, _fill, _cut, _delay, _silence)
STRIKES: dict[str, Callable[[Cluster, Fault, Process | None], bool]] = {each.__name__[1:]: each for each in _ALL}
"""By action: does it to (cluster, fault, the process at the gate); False where there was nothing to strike."""


LIMIT_S = 600.0
"""A schedule that takes longer has failed."""

_LEAVE_S = 120.0


@dataclass
class Outcome:
    """How a schedule ended.

    Attributes:
        gave_up: "role code" of processes that ended by themselves before the job did, and how often.
    """

    divergences: list[str] = field(default_factory=list)  # what is not as it must be; none: all is well
    struck: list[str] = field(default_factory=list)  # "action target" of every fault that took place
    missed: list[str] = field(default_factory=list)  # faults whose place the job did not pass
    gave_up: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # it took
    ending: Ending | None = None  # what the job left, where it ended


def conduct(
    schedule: Schedule, home: Path, expected: Ending | None, sabotage: str = "", limit_s: float = LIMIT_S
) -> Outcome:
    """Runs the schedule in this process, which must have a single thread.

    `expected` is what an undisturbed job leaves; None: this is the undisturbed one.
    """
    began = time.monotonic()
    outcome = Outcome()
    conductor = _Conductor(schedule, home, sabotage, outcome)
    try:
        conductor.run(limit_s)
        outcome.ending = ending_of(home)
        if expected is not None:
            outcome.divergences += divergences(outcome.ending, expected, schedule)
        outcome.divergences += conductor.look_into_store(outcome.ending)
    except Exception as error:  # noqa: BLE001 - whatever it is, the schedule did not end as it must
        outcome.divergences.append(f"{type(error).__name__}: {error}")
    finally:
        conductor.close()
        outcome.seconds = time.monotonic() - began
    return outcome


class _Conductor:
    def __init__(self, schedule: Schedule, home: Path, sabotage: str, outcome: Outcome) -> None:
        self._schedule = schedule
        self._outcome = outcome
        self._pending = list(schedule.faults)
        self._cluster = Cluster(schedule, home, sabotage, self._strike)

    def run(self, limit_s: float) -> None:
        """Until the master has ended well and everybody has left; raises `Failed` where it does not come to that."""
        give_up = time.monotonic() + limit_s
        self._cluster.begin(give_up)
        while not self._cluster.over:
            self._cluster.turn()
            if time.monotonic() > give_up:
                self._cluster.ask_where_they_are()
                raise Failed(f"the job has not ended after {limit_s:g} s")
        self._let_leave()

    def _strike(self, gate: str, number: int, at: Process | None) -> None:
        for fault in [fault for fault in self._pending if (fault.gate, fault.number) == (gate, number)]:
            if self._cluster.over:
                return
            self._pending.remove(fault)
            if STRIKES[fault.action](self._cluster, fault, at):
                self._outcome.struck.append(f"{fault.action} {fault.target}")
        self._cluster.armed.discard((gate, number))

    def _let_leave(self) -> None:
        """After the master's end workers leave by themselves, or find out that there is nobody."""
        for process in self._cluster.processes.values():
            if process.role == "shard":
                os.kill(process.pid, signal.SIGTERM)
            elif process.superseded:
                os.kill(process.pid, signal.SIGKILL)
        give_up = time.monotonic() + _LEAVE_S
        while self._cluster.processes:
            self._cluster.turn()
            if time.monotonic() > give_up:
                self._cluster.ask_where_they_are()
                left = [f"{process.role} {process.number}" for process in self._cluster.processes.values()]
                raise Failed(f"left over {_LEAVE_S:g} s after the end of the job: {', '.join(left)}")

    def look_into_store(self, ending: Ending) -> list[str]:
        """What the store itself holds, where it is still there."""
        template, cluster = self._schedule.store, self._cluster
        redis = redis_of(template)
        if not in_files(template) and not redis:
            return []
        while None in [server.pid for server in cluster.redis.values()]:
            cluster.turn()
        if set(redis) <= set(REDIS_SERVERS):
            servers = {name: f"127.0.0.1:{server.port}" for name, server in cluster.redis.items()}
            return store_differs(filled_in(template, servers, str(cluster.home)), ending)
        url = filled_in(template, cluster.addresses, str(cluster.home))
        loses = not lasts(template)  # what was written behind the back of a new primary
        return in_a_fork(lambda: store_differs(url, ending, loses), cluster.selector, cluster.turn)

    def close(self) -> None:
        """Ends what is left, and says what should not have been."""
        outcome, cluster = self._outcome, self._cluster
        outcome.divergences += [*cluster.lost, *cluster.close()]
        outcome.gave_up = cluster.gave_up
        filled = "fill master" in outcome.struck
        emptied = forgets(self._schedule.store) and any(what.startswith("kill s") for what in outcome.struck)
        emptied = emptied or redis_of(self._schedule.store) == PRIMARY_AND_REPLICA  # which lost what was confirmed
        # A last checkpoint; or rows: a disk that fails in the middle of a change ends a file store, and its job.
        unwritten = ("8", "6", "7") if in_files(self._schedule.store) else ("8",)
        for what, count in cluster.gave_up.items():
            role, code, *at_work = what.split(maxsplit=2)
            if code == "1":
                outcome.divergences.append(f"{role}: {count} ended with an error that nobody foresaw")
            elif role == "master" and at_work and not emptied and not (filled and code in unwritten):
                outcome.divergences.append(f"{what}: {count} gave up, though no fault lasted as long as its deadline")
        outcome.missed = [str(fault) for fault in self._pending]


_CHUNK = 1 << 16


def in_a_fork(look: Callable[[], list[str]], selector: selectors.BaseSelector, turn: Callable[[], None]) -> list[str]:
    """What `look` says in a fork, or its error, while bytes go on passing the links here."""
    heard, said = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            problems = look()
        except BaseException as error:  # noqa: BLE001 - nothing of the parent may run on here
            problems = [f"{type(error).__name__}: {error}"]
        os.write(said, json.dumps(problems).encode())
        os._exit(0)
    os.close(said)
    received: list[bytes] = []
    selector.register(heard, selectors.EVENT_READ, lambda _: received.append(os.read(heard, _CHUNK)))
    while not received or received[-1]:
        turn()
    selector.unregister(heard)
    os.close(heard)
    os.waitpid(pid, 0)
    found: list[str] = json.loads(b"".join(received))
    return found
