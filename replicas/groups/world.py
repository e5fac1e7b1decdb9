"""The replica group of all processes that MPI started, from its creation to the exit of the process."""

import atexit
import faulthandler
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from elastable.embedding_store.errors import DeadlineExceeded, NotInstalled
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone

if TYPE_CHECKING:
    from mpi4py import MPI

    from elastable.replicas.groups.mpi_group import MpiGroup


# MPICH's shared-memory files, which it leaves behind when its processes are killed


_MPICH_FILE = "/dev/shm/mpich_shm_"


def mapped_by(pid: int) -> set[str]:
    """MPICH's files that a process of this host maps; empty if the process has exited."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return {_MPICH_FILE + line.split(_MPICH_FILE)[1].split()[0] for line in maps if _MPICH_FILE in line}
    except OSError:
        return set()


def remove_files(files: Iterable[str]) -> None:
    """Unlinks them: processes that map them keep them until they exit."""
    for file in files:
        with suppress(FileNotFoundError):
            os.unlink(file)


# Environment variables with the number of processes, of the launchers of MPICH, Open MPI and Slurm.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")
DEADLINE_VARIABLE = "ELASTABLE_REPLICAS_DEADLINE"
"""Environment variable: seconds, from `elastable replicas --deadline`."""

_DEADLINE_S = 60.0
_END_S = 60.0

_groups: "list[MpiGroup]" = []
_failed = False


def started_by_mpi() -> bool:
    """Whether `elastable replicas` or `mpirun` started this process."""
    return _world is not None or any(name in os.environ for name in _SIZES)


def replica_group(deadline_s: float | None = None) -> ReplicaGroup:
    """The group of all processes that `elastable replicas` or `mpirun` started with this one.

    Every process calls it equally often. A process started alone gets a group
    of one, so that a program runs with and without replicas.

    A process that exits leaves its groups and tells the others why. After a
    normal end it waits for the others, up to the deadline.

    Args:
        deadline_s: Seconds that members wait for each other in a collective without
            progress, and for all to call this. None: `elastable replicas --deadline`, or 60.

    Raises:
        DeadlineExceeded: not all processes have called it.
        NotInstalled: there are several processes, and mpi4py is not installed.
    """
    if deadline_s is None:
        deadline_s = float(os.environ.get(DEADLINE_VARIABLE, _DEADLINE_S))
    if not started_by_mpi():
        return alone(deadline_s)
    comm = world_communicator(deadline_s)
    from elastable.replicas.groups.mpi_group import MpiGroup

    group = MpiGroup.of(comm, range(comm.size), deadline_s)
    _groups.append(group)
    return group


def leave_all(why: str) -> None:
    """Leaves all groups of this process after a failure; it then exits without waiting for others."""
    global _failed
    _failed = True
    for group in _groups:
        group.leave(why)


_world: "MPI.Intracomm | None" = None


def world_communicator(deadline_s: float) -> "MPI.Intracomm":
    """Our own communicator of all processes; the first call, which all must make, starts MPI."""
    global _world
    if _world is None:
        _world = _start(deadline_s)
        atexit.register(_end, deadline_s)
        _report_exceptions()
    return _world


def _start(deadline_s: float) -> "MPI.Intracomm":
    try:
        from elastable.replicas.groups.mpi_group import MPI
    except ImportError as error:  # mpi4py, or the MPI library that it loads
        raise NotInstalled(
            f'a group of several replicas needs MPI ({error}): pip install "elastable[replicas]"'
        ) from error
    with _no_longer_than(deadline_s):
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    for name in (*_SIZES, "PMI_FD", "PMI_RANK"):
        os.environ.pop(name, None)  # a child of this process is not a replica
    made, request = MPI.COMM_WORLD.Idup()
    give_up = time.monotonic() + deadline_s
    while not request.Test():
        if time.monotonic() > give_up:
            raise DeadlineExceeded(f"not all of {MPI.COMM_WORLD.size} replicas have come within {deadline_s:g} s")
        time.sleep(1e-4)
    # All processes have mapped the files by now; unlinked, they cannot outlive a killed process.
    remove_files(mapped_by(os.getpid()))
    return made


def _end(deadline_s: float) -> None:
    """At exit: finalizes MPI if all others exit normally, too; it would wait forever for one that does not."""
    from elastable.replicas.groups.mpi_group import IMPORTED_BEFORE, MPI

    for group in _groups:
        group.leave("its process has ended" if _failed else "its work is done")
    give_up = time.monotonic() + (0.0 if _failed else deadline_s)
    done = not _failed and all(group.monitor.all_done(max(0.0, give_up - time.monotonic())) for group in _groups)
    for group in _groups:
        group.monitor.close()
    if done and _groups and not MPI.Is_finalized():
        with _no_longer_than(_END_S):
            MPI.Finalize()
    elif IMPORTED_BEFORE:
        _arm(_END_S)  # the program lets mpi4py finalize MPI at exit


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Ends the process if MPI's own start or end takes longer: it holds the GIL and cannot be interrupted."""
    armed = _arm(seconds)
    try:
        yield
    finally:
        if armed:
            faulthandler.cancel_dump_traceback_later()


def _arm(seconds: float) -> bool:
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    except (AttributeError, ValueError):  # there is no file to write the traceback to
        return False
    return True


def _report_exceptions() -> None:
    """Tells the others about an exception that ends this process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_all(f"{kind.__name__}: {error}")
        before(kind, error, trace)

    sys.excepthook = hook
