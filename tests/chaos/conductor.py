"""Runs one schedule: strikes when the job is where the schedule says, and compares how it ends."""

import json
import os
import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cluster import Cluster, Failed, Process
from tests.chaos.schedules import Schedule
from tests.chaos.stores import PRIMARY_AND_REPLICA, REDIS_SERVERS, filled_in, forgets, in_files, lasts, redis_of
from tests.chaos.strikes import STRIKES
from tests.chaos.verdict import Ending, divergences, ending_of, store_differs

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
