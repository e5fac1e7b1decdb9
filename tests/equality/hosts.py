"""Hosts for tests: namespaces of network, names, processes and shared memory, joined by a bridge."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_NAMES = Path("/etc/netns")  # `ip netns exec` shows the files of a folder here in /etc
_CHILDREN_DIE_TOO = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_BECOMES = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
_REMOTE_SHELL = """\
#!/bin/sh
# As ssh: [OPTIONS] HOST COMMAND..., which is a line for the shell there.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec $host %s sh -c '%s' $host sh -c "$*"
"""


class Host:
    """One network namespace, whose processes see themselves and nothing but the network of the others."""

    def __init__(self, name: str, address: str, shell: Path, held: ExitStack) -> None:
        self.name, self.address = name, address
        self._shell, self._held = shell, held

    def start(self, log: Path, *words: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts `elastable WORDS` there; killed at the end. MPI starts processes on the other hosts from there."""
        command = ["ip", "netns", "exec", self.name, *_CHILDREN_DIE_TOO, "sh", "-c", _BECOMES, self.name]
        env = {**env, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(self._shell)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, sys.executable, "-m", "elastable", *words], stdout=output, stderr=output, env=env
            )
        self._held.callback(process.wait, timeout=60)
        self._held.callback(process.kill)
        return process


@contextmanager
def three_hosts(home: Path) -> Iterator[list[Host]]:
    """Three of them, joined by a bridge in a separate namespace, with delay and loss where the kernel has netem."""
    mark = f"el{os.getpid() % 100_000}"
    switch, names = f"{mark}s", [f"{mark}h{number}" for number in range(3)]
    addresses = [f"10.77.0.{number + 1}" for number in range(3)]
    known = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    shell = home / "remote-shell"
    shell.write_text(_REMOTE_SHELL % (" ".join(_CHILDREN_DIE_TOO), _BECOMES))
    shell.chmod(0o755)
    with ExitStack() as held:
        try:
            for name in (switch, *names):
                _ip("netns", "add", name)
                held.callback(_ip, "netns", "del", name, needed=False)
            _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge0", "up")
            for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
                (_NAMES / name).mkdir(parents=True)
                held.callback((_NAMES / name).rmdir)
                (_NAMES / name / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
                held.callback((_NAMES / name / "hosts").unlink)
                _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge0", "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
                netem = ("-n", name, "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "20ms", "loss", "1%")
                _ip(*netem, of="tc", needed=False)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield [Host(name, address, shell, held) for name, address in zip(names, addresses, strict=True)]


def _ip(*words: str, of: str = "ip", needed: bool = True) -> None:
    ran = subprocess.run([of, *words], capture_output=True, text=True, timeout=60, check=False)
    if needed and ran.returncode:
        raise OSError(ran.stderr)
