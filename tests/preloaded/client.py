"""Starts processes of the preloaded server, from a test and from what a test starts."""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tests.preloaded.server import Wanted

__all__ = ["HERE", "Interpreter", "PreloadedProcess", "preloaded_python", "run_preloaded"]

ROOT = Path(__file__).parents[2]
START_S = 600.0

# Stands for `python` where a test's processes start others. Signals are handed on; who kills it kills its process.
_STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
inherited = [int(number) for number in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + number)]
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
wanted = {{"arguments": sys.argv[1:], "executable": sys.argv[0], "environment": dict(os.environ),
          "folder": os.getcwd(), "descriptors": inherited, "new_session": True}}
signals = {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
socket.send_fds(server, [json.dumps(wanted).encode()], inherited)
pid = int(server.recv(64))
for number in signals:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
code = os.waitstatus_to_exitcode(int(server.recv(64)))
if code >= 0:
    os._exit(code)
signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
os.kill(os.getpid(), -code)
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python with its libraries, and variables that all its processes have."""

    python: str
    variables: tuple[tuple[str, str], ...] = ()


HERE = Interpreter(sys.executable)


def preloaded_python(of: Interpreter = HERE) -> Path:
    """An executable that replaces a Python; the first call starts the server that it asks for processes.

    All processes of a run of the tests have one server of a kind, which ends with the last of them.

    It takes `-m MODULE`, `-c PROGRAM` or a file, with arguments. Beside it lie the `elastable` command and `mpiexec`.
    """
    return _started(of)


@functools.cache  # whose keys are arguments as given: a default that is said would be another one
def _started(of: Interpreter) -> Path:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"of-{os.getpid()}")
    digest = hashlib.sha256(repr(of).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"preloaded-{run}-{digest}"
    folder.mkdir(0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "socket").exists():
            os.open(folder / "users", os.O_WRONLY | os.O_NONBLOCK)  # until this process ends; raises without a server
        else:
            _start(of, folder)
    return folder / "python"


def _start(of: Interpreter, folder: Path) -> None:
    """Starts the server; it ends when no process has the pipe `users` open any more."""
    users = folder / "users"
    users.unlink(missing_ok=True)  # of a server that did not start
    os.mkfifo(users)
    reading = os.open(users, os.O_RDONLY | os.O_NONBLOCK)  # which does not wait for a writer
    writing = os.open(users, os.O_WRONLY)
    server = subprocess.Popen(
        [of.python, "-m", "tests.preloaded.server", str(folder / "socket")],
        stdin=reading,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **dict(of.variables), "OPENBLAS_NUM_THREADS": "1"},  # whose threads would not survive a fork
    )
    os.close(reading)
    atexit.register(_end, server, writing, folder)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the server of preloaded processes ended with code {server.wait()}")
    python = folder / "python"
    python.write_text(_STAND_IN.format(python=of.python, path=str(folder / "socket")))
    command = folder / "elastable"
    command.write_text(f'#!/bin/sh\nexec {python} -m elastable "$@"\n')
    for file in (python, command):
        file.chmod(0o755)
    for file in Path(sys.executable).parent.iterdir():
        if file.name.startswith(("mpi", "hydra")):  # which the command looks for next to its Python
            (folder / file.name).symlink_to(file)


def _end(server: subprocess.Popen[bytes], writing: int, folder: Path) -> None:
    """Waits for the server, and so for the other processes of the run, which end at the same time."""
    assert server.stdout is not None
    os.close(writing)
    server.wait(60)
    server.stdout.close()
    shutil.rmtree(folder, ignore_errors=True)


class PreloadedProcess:
    """A process as of `subprocess.Popen(["python", *arguments])`: same id, same signals, same exit code."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdout: int | IO[bytes] | IO[str],
        stderr: int | IO[bytes] | IO[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        of: Interpreter = HERE,
    ) -> None:
        python = preloaded_python(of)
        environment = {**(os.environ if env is None else env), **dict(of.variables)}
        wanted = Wanted(list(arguments), str(python), environment, str(cwd), [0, 1, 2])
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(str(python.with_name("socket")))
        with open(os.devnull, "rb") as nothing:
            descriptors = [nothing.fileno(), _descriptor(stdout), _descriptor(stderr)]
            socket.send_fds(self._server, [json.dumps(asdict(wanted)).encode()], descriptors)
        self._server.settimeout(START_S)
        self.args = ["python", *arguments]
        self.pid = int(self._server.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None: it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._server.recv(64)))
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As of `subprocess.Popen`: nothing happens to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_preloaded(
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = START_S,
    of: Interpreter = HERE,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(["python", *arguments], capture_output=True, text=True)`."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        process = PreloadedProcess(arguments, out, err, cwd, env, of)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait(60)
            raise
        messages = []
        for file in (out, err):
            file.seek(0)
            messages.append(file.read().decode())
    return subprocess.CompletedProcess(process.args, code, *messages)


def _descriptor(file: int | IO[bytes] | IO[str]) -> int:
    return file if isinstance(file, int) else file.fileno()
