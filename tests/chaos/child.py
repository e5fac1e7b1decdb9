"""A process of a cluster: the `elastable` command itself, in a fork of a process that has imported everything."""

import ctypes
import faulthandler
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.gates import Gates, lay_gates
from tests.chaos.light_job import use_light_model
from tests.chaos.sabotage import SABOTAGES
from tests.preloaded import server

_PR_SET_PDEATHSIG = 1
_FRAMES_BYTES = 4096
_DISK_BYTES = 512
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class ChildPlan:
    """What one process is to be.

    Attributes:
        ports: Ports in URLs of stores that this process replaces by others: its own links.
    """

    role: str  # "master", "worker" or "shard"
    model: str  # as of `tests.chaos.schedules.Shape`
    arguments: Sequence[str]  # of the command
    log: Path  # file that gets what it writes
    environment: Mapping[str, str]  # added to the parent's
    armed: frozenset[tuple[str, int]]  # gates it waits at
    folders: Sequence[Path]  # whose file operations are gates
    ports: Mapping[int, int] = field(default_factory=dict)
    sabotage: str = ""  # name of what it does wrong on purpose; "": nothing


def import_everything() -> None:
    """Imports what any process needs, before the first fork; `RuntimeError`: that has started a thread."""
    from elastable.embedding_store.contract.spec import OptimizerSpec
    from elastable.embedding_store.warm import warm_updates

    os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
    server.import_everything()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    importlib.import_module("elastable.commands.store_commands")
    warm_updates([OptimizerSpec.of(name, lazy=False) for name in ("sgd", "adam", "adamw", "rmsprop")])


def fork_child(plan: ChildPlan) -> tuple[int, socket.socket]:
    """Starts the process; its id, and the socket on which its gates speak."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        ours.setblocking(False)
        return pid, ours
    code = 1
    try:
        code = _run(plan, theirs.detach(), parent)
    except BaseException:  # noqa: BLE001 - nothing of the parent may run on here
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _run(plan: ChildPlan, control: int, parent: int) -> int:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    log = os.open(plan.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    # Sockets of proxies and of other processes' gates are the parent's: a copy would keep them open.
    os.dup2(control, 3)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(plan.environment)
    gates = Gates(socket.socket(fileno=3), plan.armed)
    _use_own_links(plan.ports)
    _use_little_memory()
    if plan.model == "light":
        use_light_model()
    lay_gates(gates, plan.role, plan.folders)
    if plan.sabotage and plan.role in SABOTAGES[plan.sabotage]:
        SABOTAGES[plan.sabotage][plan.role]()
    if plan.role == "master":
        gates.reach("start", int(plan.environment["CHAOS_LIFE"]))
    return _command(plan.arguments)


def _use_own_links(ports: Mapping[int, int]) -> None:
    """Makes a worker reach the store through links of its own, and not through those that the master names."""
    from elastable.jobs import worker_process

    addresses: Callable[[str], list[str]] = worker_process.server_addresses  # type: ignore[attr-defined]

    def of_own_links(url: str) -> list[str]:
        own = {f"127.0.0.1:{theirs}": f"127.0.0.1:{port}" for theirs, port in ports.items()}
        return [own.get(address, address) for address in addresses(url)]

    worker_process.server_addresses = of_own_links  # type: ignore[attr-defined]


def _use_little_memory() -> None:
    """Makes file stores hold few rows in frames, and take their disk in small pieces: tables here are small."""
    from elastable.embedding_store.engine import store_tier
    from elastable.embedding_store.tiers.files import mapped_file

    plain = store_tier.RowBudget  # type: ignore[attr-defined]
    store_tier.RowBudget = lambda total: plain(min(total, _FRAMES_BYTES))  # type: ignore[assignment, attr-defined]
    mapped_file._CHUNK_BYTES = _DISK_BYTES


def _command(arguments: Sequence[str]) -> int:
    from elastable.command import main

    sys.argv = ["elastable", *arguments]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue
