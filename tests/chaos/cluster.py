"""The processes of one schedule and the links between them, in one loop of one thread, which may fork at any moment."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import secrets
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from elastable.embedding_store.support.store_url import SERVERS
from tests.chaos import stores
from tests.chaos.child import ChildPlan, fork_child
from tests.chaos.links import Link, Timers
from tests.chaos.records import MICRO_BATCH, SEED
from tests.chaos.schedules import LEASE_S, Schedule
from tests.chaos.stores import CLUSTER, PRIMARY_AND_REPLICA, SERVICE
from tests.ports import free_port
from tests.sentinels import are_complete, started_sentinels
from tests.servers import ConfiguredServer, Server, join_cluster, redis_binary, valkey_binary
from tests.untyped import Parsed

_RESTART_S = 0.05


def server_binary() -> Path:
    binary = redis_binary() or valkey_binary()
    assert binary is not None, "no redis-server and no valkey-server"
    return binary


def is_server(pid: int) -> bool:
    """Whether a process runs the server program: a server, or a fork of one that writes its files."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name == server_binary().resolve().name
    except OSError:  # it has ended
        return "redis" in Path(f"/proc/{pid}/comm").read_text() or "valkey" in Path(f"/proc/{pid}/comm").read_text()


class RedisServer:
    """One server, which keeps what it confirmed; with `lines` it has a configuration file, which it may rewrite."""

    def __init__(
        self,
        folder: Path,
        selector: selectors.BaseSelector,
        timers: Timers,
        options: Sequence[str] = (),
        lines: Sequence[str] = (),
    ) -> None:
        folder.mkdir()
        self._folder, self._selector, self._timers = folder, selector, timers
        if lines:
            lines = ("appendonly yes", "appendfsync always", *lines)
            self.server: Server = ConfiguredServer(server_binary(), folder, lines=lines)  # the server itself
        else:
            kept = ("--appendonly", "yes", "--appendfsync", "always")
            self.server = Server(server_binary(), folder, (*kept, *options))
        self._fd = -1
        self.pause_s = _RESTART_S  # from its next death until it is started again
        self._start()

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def pid(self) -> int | None:
        """Of the process; None between two lives."""
        return None if self.server.process is None else self.server.process.pid

    def signal(self, number: signal.Signals) -> int | None:
        """Sends it a signal; its process id, None where it is not there."""
        if self.pid is not None:
            os.kill(self.pid, number)
        return self.pid

    def fill(self, few: int) -> bool:
        """Lets its append-only file grow by a few bytes and no more, until it dies of that; whether it is there."""
        if self.pid is None:
            return False
        sizes = [file.stat().st_size for file in self._folder.rglob("*.incr.aof")]
        limit = max(sizes, default=0) + few
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return True

    def kill(self) -> None:
        self.server.kill()

    def _start(self) -> None:
        self.server.start()
        assert self.pid is not None
        self._fd = os.pidfd_open(self.pid)
        self._selector.register(self._fd, selectors.EVENT_READ, lambda _: self._died())

    def _died(self) -> None:
        self._selector.unregister(self._fd)
        os.close(self._fd)
        self.server.kill()
        self._timers.after(self.pause_s, self._start)


_DOWN_MS = 500  # shorter than some stops and silences: Sentinels then take a primary for dead that is not
_READY_S = 60.0


class RedisGroup:
    """Servers by name, each behind a link, which is what it calls itself to others: all traffic passes the links.

    `line` is for the configuration of those that Sentinels watch; `sentinels` is empty where nobody watches.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        line: str,
        links: Mapping[str, Link],
        home: Path,
        selector: selectors.BaseSelector,
        timers: Timers,
    ) -> None:
        self._line, self._links, self._home = line, links, home
        self._sentinels: list[ConfiguredServer] = []
        self.servers: dict[str, RedisServer] = {}  # by name
        for name in names:
            options, lines = self._settings(name)
            self.servers[name] = RedisServer(home / name, selector, timers, options, lines)
            links[name].target = self.servers[name].port
        if CLUSTER[0] in names:
            join_cluster([self.servers[name].server for name in names])

    @property
    def sentinels(self) -> dict[str, str]:
        return {f"sentinel{number}": sentinel.address for number, sentinel in enumerate(self._sentinels)}

    def watch(self, turn: Callable[[], None]) -> None:
        """Starts Sentinels where the servers need some, and turns the conductor's loop until all know each other."""
        if PRIMARY_AND_REPLICA[0] not in self.servers:
            return
        port, primary = self._links[PRIMARY_AND_REPLICA[0]].port, self.servers[PRIMARY_AND_REPLICA[0]].server
        for sentinel in started_sentinels(server_binary(), self._home, SERVICE, port, _DOWN_MS, 3000):
            self._sentinels.append(sentinel)
        end = time.monotonic() + _READY_S
        while not are_complete(primary, self._sentinels, SERVICE):
            turn()
            if time.monotonic() > end:
                raise RuntimeError(f"Sentinels are not ready after {_READY_S:g} s")

    def primary(self) -> str | None:
        """The name of the server that the first Sentinel takes for the primary."""
        with self._sentinels[0].client() as client:
            reply = client.sentinel_get_master_addr_by_name(SERVICE)
        return next((name for name in self.servers if reply and self._links[name].port == int(reply[1])), None)

    def fail_over(self) -> bool:
        """Asks for another primary, which may lack what this one has confirmed; whether there will be one."""
        try:
            with self._sentinels[0].client() as client:
                client.execute_command("SENTINEL FAILOVER", SERVICE)
        except redis.ResponseError:  # there is none that could be, or one is on its way
            return False
        return True

    def kill(self) -> None:
        for sentinel in self._sentinels:
            sentinel.kill()
        for server in self.servers.values():
            server.kill()

    def _settings(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        port = self._links[name].port
        if name in CLUSTER:
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--cluster-port", str(free_port()))
            return (*options, "--cluster-announce-port", str(port)), ()
        if name not in PRIMARY_AND_REPLICA:
            return (), ()
        own = f"replica-announce-port {port}"
        lines: tuple[str, ...] = ("repl-diskless-sync-delay 0", "replica-announce-ip 127.0.0.1", own, self._line)
        if name == PRIMARY_AND_REPLICA[1]:
            lines += (f"replicaof 127.0.0.1 {self._links[PRIMARY_AND_REPLICA[0]].port}",)
        return (), lines


class Failed(Exception):
    """The schedule cannot go on; says why."""


@dataclass
class Process:
    role: str  # "master", "worker" or "shard", a store server
    number: int  # which one of its role
    pid: int  # its process id
    control: socket.socket | None  # to its gates; None: it has closed its end
    pidfd: int  # becomes readable when it ends
    saved: int  # the newest version in a whole checkpoint when it was started
    killed: bool = False  # whether it was, by a fault, or has been given up for another in its place
    superseded: bool = False
    at_work: bool = False  # of a master: whether its job has begun

    @property
    def name(self) -> str:
        return f"shard{self.number}" if self.role == "shard" else self.role


_DEADLINE_S = 20.0  # of the product's calls: longer than any fault stores.lasts
_MODELS = {"keras": Path(__file__).with_name("job.py"), "light": Path(__file__).with_name("light_job.py")}


def arguments_of(
    schedule: Schedule,
    role: str,
    number: int,
    home: Path,
    links: Mapping[str, Sequence[Link]],
    addresses: Mapping[str, str],
    saved: int,
) -> list[str]:
    """The words behind `elastable`; `addresses` are through the master's links, `saved` is the newest checkpoint."""
    transport = ["--transport", schedule.transport]
    if role == "worker":
        address = f"127.0.0.1:{links['worker-master'][number].port}"
        model = str(_MODELS[schedule.shape.model])
        return ["worker", model, "--master", address, "--deadline", f"{_DEADLINE_S:g}", *transport]
    if role == "shard":
        listen = f"127.0.0.1:{links[f'master-shard{number}'][0].target or 0}"
        return [
            "store",
            "--listen",
            listen,
            "--store",
            stores.shard_store(schedule.store, number, str(home)),
            *transport,
        ]
    words = ["master", str(_MODELS[schedule.shape.model]), "--listen", "127.0.0.1:0", *transport]
    store = stores.filled_in(schedule.store, addresses, str(home))
    words += ["--stores", store.removeprefix(SERVERS)] if store.startswith(SERVERS) else ["--store", store]
    words += ["--deadline", f"{_DEADLINE_S:g}", "--lease", f"{LEASE_S:g}", "--mode", schedule.shape.mode]
    words += ["--epochs", str(schedule.shape.epochs), "--micro-batch-size", str(MICRO_BATCH)]
    words += ["--seed", str(SEED)]
    words += ["--grads-to-wait", str(schedule.shape.grads_to_wait), "--evaluate-every", str(schedule.evaluate_every)]
    words += ["--run-dir", str(home / "runs"), "--no-export", "--checkpoint-dir", str(home / "checkpoints")]
    words += ["--checkpoint-every", str(schedule.checkpoint_every), "--keep", str(schedule.keep), "--resume"]
    words += ["--take-over"]  # a cut link hides from Redis that the master before is dead
    if not schedule.shape.lazy:
        words += ["--no-lazy"]
    fails_over = stores.redis_of(schedule.store) == stores.PRIMARY_AND_REPLICA
    if (stores.forgets(schedule.store) or fails_over) and not saved:
        words += ["--overwrite"]  # what a master left in the store that died before its first checkpoint
    return words


_RESTART_S = 0.05
_LEFT_TOO_EARLY_S = 6.0
_PR_SET_CHILD_SUBREAPER = 36
_PLAIN_OUTPUT = {"NO_COLOR": "1", "COLUMNS": "200"}


class Cluster:
    """Starts what a schedule needs, starts again what ended, and hears what gates say.

    `reached` is called with (gate, number, process) when a process waits at a gate; of a gate that a proxy watches, the
    process is None.
    """

    def __init__(
        self,
        schedule: Schedule,
        home: Path,
        sabotage: str,
        reached: Callable[[str, int, Process | None], None],
        most_lives: int = 12,
    ) -> None:
        self.schedule, self.home, self._sabotage, self._reached = schedule, home, sabotage, reached
        self._most_lives = most_lives
        self.selector = selectors.DefaultSelector()
        self.timers = Timers()
        self.processes: dict[int, Process] = {}
        self.links: dict[str, list[Link]] = {}
        self.redis: dict[str, RedisServer] = {}  # the Redis servers, by name
        self.redis_group: RedisGroup | None = None  # what they are together; None: there are none
        self.over = False  # whether a master has ended well
        self.acknowledged = 0  # the newest version that a master has reported
        self.lost: list[str] = []  # promises that were broken, in words
        self.gave_up: Counter[str] = Counter()  # "role code" of processes that ended by themselves before the job did
        self.armed = {(fault.gate, fault.number) for fault in schedule.faults}
        self._lives: Counter[str] = Counter()
        home.mkdir(parents=True)
        self.checkpoints.mkdir()

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    @property
    def _token(self) -> Path:
        return self.home / "token"

    def begin(self, give_up: float) -> None:
        """Starts everything. Raises `Failed` where the store does not start before `give_up`."""
        # Whoever claims store servers is their administrator.
        self._token.touch(0o600)
        self._token.write_text(secrets.token_hex(32))
        # Orphans become children of this process: none gets lost.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.links["worker-master"] = [Link(self.selector, self.timers) for _ in range(self.schedule.workers)]
        self._start_redis(stores.redis_of(self.schedule.store))
        for name in stores.processes_of(self.schedule.store):
            self._link_store(name, self.schedule.workers)
            self.start("shard", int(name.removeprefix("shard")))
            while self.links[f"master-{name}"][0].target is None:
                self.turn()
                if time.monotonic() > give_up:
                    raise Failed(f"{name} does not start")
        self.start("master", 0)
        for number in range(self.schedule.workers):
            self.start("worker", number)

    def turn(self) -> None:
        """Waits for something to happen, a quarter of a second at most, and sees to it."""
        wait = self.timers.run()
        for key, events in self.selector.select(wait):
            if self.selector.get_map().get(key.fd) is key:  # not closed, nor another, since
                key.data(events)

    # Processes.

    def start(self, role: str, number: int) -> None:
        """Starts a life of a process. Raises `Failed` where there have been too many."""
        self._lives[f"{role}-{number}"] += 1
        life = self._lives[f"{role}-{number}"]
        log = self.home / f"{role}-{number}.log"
        if life > self._most_lives:
            raise Failed(f"{role} {number} has lived {self._most_lives} times; see {log}")
        saved = self.saved()
        shape = self.schedule.shape
        plan = ChildPlan(
            role=role,
            model=shape.model,
            arguments=arguments_of(self.schedule, role, number, self.home, self.links, self.addresses, saved),
            log=log,
            environment={
                "CHAOS_OPTIMIZER": shape.optimizer,
                "CHAOS_LIFE": str(life),
                "CHAOS_PAUSE": str(self.schedule.pause_s),
                "ELASTABLE_TOKEN_FILE": str(self._token),
                **_PLAIN_OUTPUT,
            },
            armed=frozenset(self.armed),
            folders=(self.checkpoints, self.home / "rows"),
            ports=self._own_ports(number) if role == "worker" else {},
            sabotage=self._sabotage,
        )
        pid, control = fork_child(plan)
        process = Process(role, number, pid, control, os.pidfd_open(pid), saved)
        self.processes[pid] = process
        self.selector.register(control, selectors.EVENT_READ, lambda _: self._hear(process))
        self.selector.register(process.pidfd, selectors.EVENT_READ, lambda _: self._bury(process))

    def start_again(self, role: str, number: int, after_s: float) -> None:
        """Starts the next life of a process in a while, unless the job is over by then."""
        self.timers.after(max(after_s, _RESTART_S), lambda: None if self.over else self.start(role, number))

    def saved(self) -> int:
        """The newest version in a checkpoint that is whole; 0: there is none."""
        found = self.checkpoints.glob("ckpt-*/manifest.json")
        return max((int(manifest.parent.name.split("-")[1]) for manifest in found), default=0)

    def _own_ports(self, number: int) -> dict[int, int]:
        return {
            links[0].port: self.links[name.replace("master", "worker")][number].port
            for name, links in self.links.items()
            if name.replace("master-", "") in stores.processes_of(self.schedule.store)
        }

    def _hear(self, process: Process) -> None:
        assert process.control is not None
        try:
            said = process.control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self.selector.unregister(process.control)
            process.control.close()
            process.control = None
            return
        self._heed(process, json.loads(said))

    def _heed(self, process: Process, message: Parsed) -> None:
        if "gate" in message:
            self._reached(message["gate"], message["number"], process)
            if process.control is not None:
                with contextlib.suppress(OSError):  # it may have been killed
                    process.control.send(b"go")
        elif "address" in message:
            port = int(message["address"].rpartition(":")[2])
            store = process.name
            names = ("worker-master",) if process.role == "master" else (f"master-{store}", f"worker-{store}")
            for link in (link for name in names for link in self.links[name]):
                link.target = port
        elif "begins" in message:
            process.at_work = True
            # A superseded master that wakes up may complete its checkpoint after its successor has looked for one;
            # to Redis it can commit nothing any more.
            promised = self.acknowledged if stores.lasts(self.schedule.store) else process.saved
            if message["begins"] < promised:
                self.lost.append(f"version {promised} stood, and the master goes on at {message['begins']}")
        elif "version" in message:
            self.acknowledged = max(self.acknowledged, message["version"])

    def _bury(self, process: Process) -> None:
        self.selector.unregister(process.pidfd)
        os.close(process.pidfd)
        _, status = os.waitpid(process.pid, 0)
        del self.processes[process.pid]
        while process.control is not None:  # what it said last
            self._hear(process)
        code = os.waitstatus_to_exitcode(status)
        if process.role == "master" and code == 0 and not process.superseded:
            self.over = True
        if self.over or process.superseded:
            return
        if process.role == "worker" and code == 0:
            # It heard that the job is over. Should the master die before it has saved, there is work again.
            self.start_again("worker", process.number, _LEFT_TOO_EARLY_S)
            return
        if not process.killed:
            self.gave_up[f"{process.role} {code}{' at work' if process.at_work else ''}"] += 1
        if not process.killed or process.role == "worker":
            # The successor of another one that was killed is started by who killed it.
            self.start_again(process.role, process.number, _RESTART_S)

    # Stores.

    def _start_redis(self, names: tuple[str, ...]) -> None:
        if not names:
            return
        for name in names:
            self._link_store(name, 0)  # rows in Redis are looked up at the master
        links = {name: self.links[f"master-{name}"][0] for name in names}
        self.redis_group = RedisGroup(
            names, stores.server_line(self.schedule.store), links, self.home, self.selector, self.timers
        )
        self.redis = self.redis_group.servers
        self.redis_group.watch(self.turn)

    def _link_store(self, store: str, direct: int) -> None:
        master, *workers = (Link(self.selector, self.timers) for _ in range(1 + direct))
        self.links[f"master-{store}"], self.links[f"worker-{store}"] = [master], workers
        seen = {"redis2": "exec2", "node1": "exec2", "node2": "exec3", "replica": "exec2"}.get(store, "exec")
        master.awaited = {number for gate, number in self.armed if gate == seen}
        master.on_transaction = lambda number: self._reached(seen, number, None)

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of all that a store's URL may name, through the master's links."""
        own = [name for name in self.links if name.startswith("master-")]
        found = {name.removeprefix("master-"): f"127.0.0.1:{self.links[name][0].port}" for name in own}
        return found | (self.redis_group.sentinels if self.redis_group is not None else {})

    # The end.

    def ask_where_they_are(self) -> None:
        """Every process writes the stacks of its threads to its log."""
        for process in self.processes.values():
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGUSR1)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            self.turn()

    def close(self) -> list[str]:
        """Ends everything; processes that nobody knew of, in words."""
        for process in self.processes.values():
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
        if self.redis_group is not None:
            self.redis_group.kill()
        for link in (link for links in self.links.values() for link in links):
            link.close()
        left = [int(word) for word in Path("/proc/thread-self/children").read_text().split()]
        of_redis = {pid for pid in left if is_server(pid)}  # one that was killed while it saved in a fork
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return [f"process {pid} was left over" for pid in left if pid not in of_redis]
