"""The monitor that MPI starts for each member: it starts the program, watches it, and outlives it.

MPICH's launcher kills every member as soon as one dies by a signal, before the others could tell who it was and save
what they have. So the process that it knows is this one, which lives until all programs have ended; the program is its
child, and takes part in MPI through the connection that it inherits.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeAlias

from elastable.embedding_store.contract.malformed import Document
from elastable.replicas.groups.peer_monitor import this_host
from elastable.replicas.groups.world import mapped_by, remove_files

_LAST_WORDS_S = 5.0
_POLL_S = 1.0


ADDRESS, TOKEN = "ELASTABLE_REPLICAS", "ELASTABLE_REPLICAS_TOKEN"
"""Environment variables: the address of the control server, and the token that it asks for."""

Message: TypeAlias = Document
"""One line of JSON."""

_CONNECT_S = 20.0


class ControlClient:
    """One member's connections; messages are lines of JSON.

    Raises:
        OSError: the control server cannot be reached.
    """

    def __init__(self) -> None:
        self._hosts, self._port = json.loads(os.environ[ADDRESS])
        self._hello = {
            "token": os.environ[TOKEN],
            "rank": int(os.environ["PMI_RANK"]),
            "pid": os.getpid(),
            "host": this_host(),
            "name": socket.gethostname(),
        }
        self._control = self._connect("control")

    def redirect_output(self) -> None:
        """Sends what this process and its children write from now on to the control server."""
        for channel, stream in (("out", sys.stdout), ("err", sys.stderr)):
            with self._connect(channel) as connection:
                os.dup2(connection.fileno(), stream.fileno())

    def send(self, message: Message) -> None:
        """Sends a message; if the server is gone, `messages` ends."""
        with suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[Message]:
        """Messages to this member, until the connection ends."""
        with suppress(OSError, ValueError):
            while line := read_line(self._control):
                yield json.loads(line)

    def _connect(self, channel: str) -> socket.socket:
        failure = OSError("there is no address to connect to")
        for host in self._hosts:
            try:
                connection = socket.create_connection((host, self._port), timeout=_CONNECT_S)
            except OSError as error:
                failure = error
                continue
            connection.settimeout(None)
            connection.sendall(json.dumps({**self._hello, "channel": channel}).encode() + b"\n")
            return connection
        raise failure


def read_line(connection: socket.socket) -> bytes:
    """The bytes up to the next line break; empty: the connection has ended."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return b""
        line += piece
    return line[:-1]


class _Child:
    """The program."""

    def __init__(self, words: list[str]) -> None:
        reading, writing = os.pipe()
        inherited = [writing, *([int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "elastable.replica_program", str(writing), *words],
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
        )
        os.close(writing)
        self._why = reading
        self.pid = self._process.pid

    def wait(self) -> tuple[int, str]:
        """Its exit code (a signal: negative), and the error that it reported."""
        files = set[str]()  # a program that ends while MPI starts leaves them behind
        while True:
            files = files or mapped_by(self.pid)
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_POLL_S)
                break
        remove_files(files)
        os.set_blocking(self._why, False)  # a child of the child may hold the other end
        with suppress(BlockingIOError), os.fdopen(self._why, "rb") as why:
            return code, (why.read() or b"").decode(errors="replace")
        return code, ""

    def signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Ends it, at once if it does not end by itself."""
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        self.signal(signal.SIGKILL)


def main() -> None:
    """Runs the program of the command line, and ends when the launcher is gone."""
    client = ControlClient()
    client.redirect_output()
    child = _Child(sys.argv[1:])

    def obey() -> None:
        for message in client.messages():
            child.signal(message["signal"])
        child.end()

    obeying = threading.Thread(target=obey, daemon=True)
    obeying.start()
    code, why = child.wait()
    client.send({"ended": code, "why": why})
    # Nobody waits for what it and its children write from now on.
    with open(os.devnull, "wb") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    while obeying.is_alive():
        obeying.join(_POLL_S)


if __name__ == "__main__":
    main()
