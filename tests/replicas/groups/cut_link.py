"""Two members whose link is cut, in a separate network: `python -m tests.replicas.groups.cut_link DEADLINE_S`."""

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import time

from elastable.replicas.groups.peer_monitor import PeerMonitor

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_LIMIT_S = 120.0


def own_network() -> bool:
    """Moves this process into a separate network namespace; whether it could."""
    libc = ctypes.CDLL(None, use_errno=True)
    users = 0 if os.geteuid() == 0 else _CLONE_NEWUSER
    return libc.unshare(users | _CLONE_NEWNET) == 0


def set_link(up: bool) -> None:
    """The loopback link of this network; while it is down, packets are lost without a word."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags, b""))


def main(deadline_s: float) -> None:
    if not own_network():
        print(json.dumps("no network"))
        return
    set_link(True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), timeout=10)
        other, _ = server.accept()
    monitors = PeerMonitor(0, {1: one}, deadline_s), PeerMonitor(1, {0: other}, deadline_s)
    set_link(False)
    began = time.monotonic()
    while not all(monitor.gone for monitor in monitors) and time.monotonic() < began + _LIMIT_S:
        time.sleep(0.01)
    print(json.dumps([list(monitor.gone.values()) for monitor in monitors] + [time.monotonic() - began]))
    for monitor in monitors:
        monitor.close()


if __name__ == "__main__":
    main(float(sys.argv[1]))
