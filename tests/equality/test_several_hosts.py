"""A job over three hosts: network namespaces joined by a bridge, with delay and loss where the kernel has netem."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.equality.jobs import MODEL, Numbers, differing, train, trained_numbers
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.process]

LIMIT_S = 400.0
PORT, STORE_PORT = 50051, 50061


class Host:
    """One network namespace, in which processes see themselves and the others, and nothing else.

    Attributes:
        address: Of its only interface.
    """

    def __init__(self, name: str, address: str, held: ExitStack) -> None:
        self._name, self.address = name, address
        self._held = held

    def start(self, log: Path, *words: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Starts `elastable WORDS` there; killed at the end."""
        command = ["ip", "netns", "exec", self._name, sys.executable, "-m", "elastable", *words]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        self._held.callback(process.wait, timeout=60)
        self._held.callback(process.kill)
        return process


def ip(*words: str, of: str = "ip", needed: bool = True) -> None:
    ran = subprocess.run([of, *words], capture_output=True, text=True, timeout=60, check=False)
    if needed and ran.returncode:
        raise OSError(ran.stderr)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Three of them, joined by a bridge that lies in a namespace of its own."""
    mark = f"el{os.getpid() % 100_000}"
    switch, names = f"{mark}s", [f"{mark}h{number}" for number in range(3)]
    with ExitStack() as held:
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
                held.callback(ip, "netns", "del", name, needed=False)
            ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge0", "up")
            for number, name in enumerate(names):
                ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", switch, "link", "set", f"port{number}", "master", "bridge0", "up")
                ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
                netem = ("-n", name, "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "20ms", "loss", "1%")
                ip(*netem, of="tc", needed=False)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield [Host(name, f"10.77.0.{number + 1}", held) for number, name in enumerate(names)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    return train(tmp_path_factory.mktemp("alone"), 1, "adagrad")


@pytest.mark.timeout(1200)
def test_a_job_over_three_hosts_trains_the_same_numbers(alone: Numbers, tmp_path: Path, hosts: list[Host]) -> None:
    """Master and a worker on one host, a store server and a worker on each of the others."""
    env = {**os.environ, "EQUALITY_OPTIMIZER": "adagrad", "EQUALITY_RANDOM": "1", "EQUALITY_VOCABULARY": "40"}
    env |= {"EQUALITY_PAUSE": "0", "EQUALITY_GATE": ""}
    for number, host in enumerate(hosts[1:]):
        log = tmp_path / f"store-{number}.log"
        host.start(log, "store", "--listen", f"{host.address}:{STORE_PORT}", "--insecure", env=env)
        until(lambda log=log: b"store server at" in log.read_bytes(), LIMIT_S)  # type: ignore[misc]
    where = f"{hosts[0].address}:{PORT}"
    words = ["master", str(MODEL), "--listen", where, "--insecure", "--micro-batch-size", "16", "--seed", "11"]
    words += ["--grads-to-wait", "4", "--run-dir", str(tmp_path), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    words += ["--no-export", "--stores", ",".join(f"{host.address}:{STORE_PORT}" for host in hosts[1:])]
    master = hosts[0].start(tmp_path / "master.log", *words, env=env)
    workers = [
        host.start(tmp_path / f"worker-{n}.log", "worker", str(MODEL), "--master", where, "--deadline", "120", env=env)
        for n, host in enumerate(hosts)
    ]
    assert master.wait(LIMIT_S) == 0, (tmp_path / "master.log").read_text()
    assert [worker.wait(LIMIT_S) for worker in workers] == [0, 0, 0]
    assert differing(alone, trained_numbers(tmp_path / "checkpoints")) == []
