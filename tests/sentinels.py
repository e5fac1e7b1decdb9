"""Real Sentinels for tests: three of them, which watch a master with one replica."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.ports import free_port
from tests.servers import START_S, ConfiguredServer, Server, running_server
from tests.waiting import until

SERVICE = "mymaster"
_DOWN_MS = 500


@dataclass
class Watched:
    """A master, its replica, and the Sentinels that watch them."""

    servers: list[Server]
    sentinels: list[Server]
    password: str | None = None

    @property
    def url(self) -> str:
        """Without options but the service."""
        login = f":{self.password}@" if self.password else ""
        addresses = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{login}{addresses}?service={SERVICE}"

    def master(self) -> Server:
        """The server that the first Sentinel names now."""
        with self.sentinels[0].client() as client:
            _, port = client.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def replica(self) -> Server:
        master = self.master()
        return next(server for server in self.servers if server is not master)

    def wait_for_replica(self, limit_s: float = START_S) -> None:
        """Returns once the replica is connected and has everything, and the Sentinels know it and each other."""
        end = time.monotonic() + limit_s
        while not self._complete():
            if time.monotonic() > end:
                raise RuntimeError(f"Sentinels are not ready after {limit_s} s")
            time.sleep(0.05)

    def fail_over(self, limit_s: float = 120.0) -> None:
        """Makes the replica the master once it has everything that the old one confirmed, and ends the old one."""
        old = self.master()
        with old.client() as client:
            client.client_pause(int(2000 * limit_s), all=False)  # writes wait, and are done nowhere
        self.wait_for_replica(limit_s)
        until(lambda: self.master() is not old or self._asks_to_fail_over(), limit_s)
        until(lambda: self.master() is not old, limit_s)
        old.kill()

    def _asks_to_fail_over(self) -> bool:
        try:
            with self.sentinels[0].client() as client:
                client.execute_command("SENTINEL FAILOVER", SERVICE)
        except redis.ResponseError as error:  # what a Sentinel knows of a replica may be too old
            return "INPROG" in str(error)
        return True

    def _complete(self) -> bool:
        try:
            return are_complete(self.master(), self.sentinels, SERVICE)
        except (redis.RedisError, StopIteration):
            return False


def are_complete(master: Server, sentinels: Sequence[Server], service: str) -> bool:
    """Whether the replica is connected and has everything, and the Sentinels know it and each other."""
    with master.client() as client:
        info = client.info("replication")
    replica = info.get("slave0", {})
    if replica.get("state") != "online" or replica["offset"] < info["master_repl_offset"]:
        return False
    for sentinel in sentinels:
        with sentinel.client() as client:
            state, replicas = client.sentinel_master(service), client.sentinel_slaves(service)
        up = [one for one in replicas if not one["is_sdown"] and one["flags"] == "slave"]
        if state["num-other-sentinels"] != len(sentinels) - 1 or not up or state["is_sdown"]:
            return False
    return True


def started_sentinels(
    binary: Path,
    directory: Path,
    service: str,
    port: int,
    down_ms: int,
    failover_ms: int,
    password: str | None = None,
    lines: Sequence[str] = (),
) -> Iterator[ConfiguredServer]:
    """Three of them, of which two must agree that the master at `port` is down; whoever asks for one kills it."""
    watched = (
        f"sentinel monitor {service} 127.0.0.1 {port} 2",
        f"sentinel down-after-milliseconds {service} {down_ms}",
        f"sentinel failover-timeout {service} {failover_ms}",
    )
    for number in range(3):
        home = directory / f"sentinel{number}"
        home.mkdir(parents=True)
        words = ("--sentinel",)
        sentinel = ConfiguredServer(binary, home, (), password, free_port(), lines=(*watched, *lines), words=words)
        sentinel.start()
        yield sentinel


@contextmanager
def running_watched(
    binary: Path,
    directory: Path,
    password: str | None = None,
    sentinel_password: str | None = None,
    down_ms: int = _DOWN_MS,
) -> Iterator[Watched]:
    """A master and a replica, watched by three Sentinels of which two must agree; all stopped at the end.

    A master that is silent for `down_ms` milliseconds is down.
    """
    with ExitStack() as stack:
        login = ("--masterauth", password) if password else ()
        options = ("--repl-diskless-sync-delay", "0", *login)
        master, replica = (
            stack.enter_context(running_server(binary, directory / f"node{number}", options, password))
            for number in range(2)
        )
        with replica.client() as client:
            client.replicaof("127.0.0.1", master.port)
        lines = [f"sentinel auth-pass {SERVICE} {password}"] if password else []
        if sentinel_password:
            lines += [f"requirepass {sentinel_password}", f"sentinel sentinel-pass {sentinel_password}"]
        sentinels: list[Server] = []
        for sentinel in started_sentinels(
            binary, directory, SERVICE, master.port, down_ms, 5000, sentinel_password, lines
        ):
            stack.callback(sentinel.kill)
            sentinels.append(sentinel)
        watched = Watched([master, replica], sentinels, password)
        watched.wait_for_replica()
        yield watched
