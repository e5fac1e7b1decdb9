"""Waiting until a Redis server has done what it was sent, without taking its replies."""

import fcntl
import socket
import termios
from array import array
from pathlib import Path

from tests.waiting import until


def until_done(connection: socket.socket) -> None:
    """Returns once the server on this machine has done all it was sent on the connection. Its replies stay there.

    The bytes are gone from both sockets once it has read them. It does one thing at a time, so when it answers another
    connection after that, it has done what it read.
    """
    until(lambda: not _sent_and_unread(connection))
    with socket.create_connection(connection.getpeername()[:2], timeout=60) as another:
        another.sendall(b"PING\r\n")
        assert another.recv(100)


def _sent_and_unread(connection: socket.socket) -> int:
    """Bytes that the other end has not taken from its socket yet."""
    size = array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, size)
    ends = f":{connection.getpeername()[1]:04X}", f":{connection.getsockname()[1]:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        here, there, _, queues = line.split()[1:5]
        if here.endswith(ends[0]) and there.endswith(ends[1]):
            return size[0] + int(queues.partition(":")[2], 16)
    return size[0]
