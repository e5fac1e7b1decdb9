"""What processes use: processor time, memory, bytes of their TCP connections, and ports. Linux only."""

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

_PIDFD_GETFD = 438  # the system call, on every architecture
_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info; tcpi_bytes_received follows
_TICKS = os.sysconf("SC_CLK_TCK")


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


def free_port() -> int:
    """One that nothing listens on at the moment."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
