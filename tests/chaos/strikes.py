"""What each fault does to a cluster."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace

from tests.chaos.cluster import Cluster, Process
from tests.chaos.links import Link
from tests.chaos.schedules import Fault

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
