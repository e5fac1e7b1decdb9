"""A process of a cluster: the `elastable` command itself, forked where everything has been imported, and its gates.

At a gate a fault may strike: the process waits there until the conductor lets it go on.
"""

import ctypes
import faulthandler
import functools
import importlib
import itertools
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.light_job import use_light_model
from tests.chaos.sabotage import SABOTAGES
from tests.preloaded import server

if TYPE_CHECKING:
    from elastable.embedding_store.contract.row_data import Commit
    from elastable.worker.runtime.compute import Prepared


_LIMIT_S = 120.0
_MESSAGE_BYTES = 1 << 16


class Gates:
    """One process's side of its gates, of which each of `armed` is waited at once. Any thread may reach one."""

    def __init__(self, control: socket.socket, armed: Iterable[tuple[str, int]]) -> None:
        self._control = control
        self._control.settimeout(_LIMIT_S)
        self._armed = set(armed)
        self._turn = threading.Lock()

    def reach(self, name: str, number: int) -> None:
        if (name, number) not in self._armed:
            return
        with self._turn:
            if (name, number) in self._armed:
                self._armed.discard((name, number))
                self._say(gate=name, number=number)
                if not self._control.recv(_MESSAGE_BYTES):
                    os._exit(1)  # the conductor is gone

    def waits_at(self, name: str, number: int) -> bool:
        return (name, number) in self._armed

    def tell(self, **what: object) -> None:
        with self._turn:
            self._say(**what)

    def _say(self, **what: object) -> None:
        self._control.send(json.dumps(what).encode())


def lay_gates(gates: Gates, role: str, folders: Sequence[Path]) -> None:
    """Lays a role's gates around the product's methods, here; operations on files in `folders` count as "disk"."""
    if role == "worker":
        _lay_worker(gates)
    else:
        _lay_server(gates)
    if role == "master":
        _lay_master(gates)
        _lay_tiers(gates)
        _lay_shards(gates)
        _lay_disk(gates, folders)
    if role == "shard":
        _lay_store(gates)
        _lay_tiers(gates)


def _around(
    owner: object, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Calls `before(*arguments)` and `after(result, *arguments)` around a method."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def around(*arguments: object, **named: object) -> object:
        if before is not None:
            before(*arguments)
        result = plain(*arguments, **named)
        if after is not None:
            after(result, *arguments)
        return result

    setattr(owner, name, around)


def _lay_worker(gates: Gates) -> None:
    from elastable.master.rpc.client import MasterClient
    from elastable.worker.runtime.compute import MicroBatchComputer
    from tests.chaos.light_job import Computer

    def number(prepared: "Prepared") -> int:
        # Evaluated micro-batches have numbers of their own, which begin at 0 again.
        return int(prepared.task.micro_batch) if prepared.task.kind == "train" else -1

    for computer in (MicroBatchComputer, Computer):
        _around(computer, "prepare", after=lambda prepared, *_: gates.reach("prepared", number(prepared)))
        _around(
            computer,
            "train",
            before=lambda _, prepared, *__: gates.reach("looked-up", number(prepared)),
            after=lambda _, __, prepared, *___: gates.reach("computed", number(prepared)),
        )
    _around(MasterClient, "report_gradient", after=lambda _, __, push: gates.reach("reported", push.id.micro_batch))


def _lay_server(gates: Gates) -> None:
    from elastable.embedding_store.wire.server.grpc_server import GrpcServer

    _around(GrpcServer, "__init__", after=lambda _, server, *__: gates.tell(address=server.address))


def _lay_master(gates: Gates) -> None:
    from elastable.jobs.job_hooks import JobHooks
    from elastable.master.commits.committer import Committer
    from elastable.master.core.job_master import Master

    _around(
        Master,
        "report_gradient_later",  # what the service calls
        before=lambda _, push: gates.reach("arrived", push.id.micro_batch),
        after=lambda _, __, push: gates.reach("counted", push.id.micro_batch),
    )
    _around(Master, "run", before=lambda master, *_: gates.tell(begins=master.progress().version))
    _around(Committer, "commit", before=lambda _, version, *__: gates.reach("commit", version))

    committers: list[Committer] = []
    _around(Committer, "__init__", after=lambda _, committer, *__: committers.append(committer))

    def committed(_: object, version: int, *__: object) -> None:
        # A version that is not logged yet may turn out never to have been (`Hooks.waits_for_log`).
        gates.tell(version=version - (committers[-1].unlogged is not None))
        gates.reach("version", version)

    _around(JobHooks, "on_version", before=committed)
    for kind in _stores():
        _around(kind, "commit", after=lambda _, __, commit, *___: gates.reach("rows", commit.version))
        _around(kind, "put", after=_counting(gates, "restore"))


def _lay_tiers(gates: Gates) -> None:
    """Every place at which a store's rows, state and log lag behind one another, whatever tier and log are."""
    from elastable.embedding_store.log.file_log import FileLog
    from elastable.embedding_store.tiers.files.file_tier import FileTier
    from elastable.embedding_store.tiers.redis.redis_log import RedisLog
    from elastable.embedding_store.tiers.redis.redis_tier import RedisTier

    logged, stated = _counting(gates, "logged"), _counting(gates, "stated")
    writing, written = _counting(gates, "writing"), _counting(gates, "written")
    for log in (FileLog, RedisLog):
        _around(log, "append", after=logged)
    for tier in (FileTier, RedisTier):
        _around(tier, "write", before=writing, after=written)
        _around(tier, "put_state", after=stated)


def _lay_store(gates: Gates) -> None:
    from elastable.embedding_store.shards.shard import Shard

    _around(Shard, "commit", after=lambda _, __, commit, *___: gates.reach("stored", commit.version))


def _lay_shards(gates: Gates) -> None:
    """One shard makes its part of a version, each time another one first, and the others wait for it."""
    from elastable.embedding_store.composite.store_group import CommitCoordinator

    plain = CommitCoordinator._finish

    def finish(
        self: CommitCoordinator, commit: "Commit", waves: Sequence[Mapping[int, Callable[[], None]]], together: bool
    ) -> None:
        if gates.waits_at("half", commit.version):
            waves = [_one_first(gates, wave, commit.version) for wave in waves]
        plain(self, commit, waves, together)

    CommitCoordinator._finish = finish  # type: ignore[method-assign]


def _one_first(gates: Gates, calls: Mapping[int, Callable[[], None]], version: int) -> dict[int, Callable[[], None]]:
    if len(calls) < 2:
        return dict(calls)
    first = sorted(calls)[version % len(calls)]
    ended = threading.Event()

    def begin() -> None:
        try:
            calls[first]()
            gates.reach("half", version)
        finally:
            ended.set()

    def follow(call: Callable[[], None]) -> None:
        ended.wait(_LIMIT_S)
        call()

    # The first comes first: where there is one thread, it must not wait for itself.
    return {first: begin, **{shard: functools.partial(follow, calls[shard]) for shard in calls if shard != first}}


def _stores() -> tuple[type, ...]:
    from elastable.embedding_store.composite.partitioned_store import PartitionedStore
    from elastable.embedding_store.engine.memory_store import MemoryStore
    from elastable.embedding_store.wire.pushes.remote_store import RemoteStore

    return MemoryStore, RemoteStore, PartitionedStore


def _counting(gates: Gates, name: str) -> Callable[..., None]:
    numbers = itertools.count(1)  # shards are restored by several threads

    def count(*_: object) -> None:
        gates.reach(name, next(numbers))

    return count


def _lay_disk(gates: Gates, folders: Sequence[Path]) -> None:
    """Every file operation of Python itself below `folders`; those of libraries in other languages are not seen."""
    watched, count, busy = tuple(map(str, folders)), _counting(gates, "disk"), threading.local()

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _FILE_EVENTS or getattr(busy, "now", False):
            return
        busy.now = True
        try:
            if any(
                isinstance(word, str | os.PathLike) and str(os.fspath(word)).startswith(watched) for word in arguments
            ):
                count()
        finally:
            busy.now = False

    sys.addaudithook(look)


_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree"}


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
