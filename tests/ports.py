"""Ports for servers that must come back at the address that they had."""

import errno
import socket
from random import SystemRandom

# Below the ports that the system gives to connections of its own (from 32768 on Linux): whatever else this machine
# does, nobody is given one of them between our asking and the server's start.
_PORTS = range(12_000, 32_000)


def free_port() -> int:
    while True:
        port = SystemRandom().choice(_PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"
