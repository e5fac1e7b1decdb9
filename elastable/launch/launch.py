"""Starts the members of a replica group by MPICH's mpiexec, watches over them, and ends them all together."""

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from elastable.embedding_store.errors import JobFailed, NotInstalled
from elastable.launch.member import ADDRESS, TOKEN, Message, read_line
from elastable.process.exit_codes import ExitCode, error_of
from elastable.replicas.groups.peer_monitor import own_addresses, this_host
from elastable.replicas.groups.world import DEADLINE_VARIABLE

_TERM_S = 3.0
_TICK_S = 0.1
_LAST_LINES_S = 1.0
_HELLO_S = 5.0
_LONGEST_LINE = 1 << 16  # of what a member writes


@dataclass
class _Member:
    """One rank, as far as the launcher knows.

    Attributes:
        pid: Process id of the monitor that runs its program; 0: it has not connected.
        host: As `this_host` there.
        name: Name of its host.
        control: Its control connection; None: not connected, or closed.
        code: Exit code of its program, a signal as a negative number; None: it still runs.
        why: The error that its program reported.
        failed_at: When its failure became known; None: it has not failed.
        ended_by_us: Whether the launcher ended it.
    """

    pid: int = 0
    host: str = ""
    name: str = ""
    control: socket.socket | None = None
    code: int | None = None
    why: str = ""
    failed_at: float | None = None
    ended_by_us: bool = False

    @property
    def caused(self) -> bool:
        """Whether another member's failure probably caused its own."""
        return self.code == ExitCode.UNAVAILABLE

    @property
    def running(self) -> bool:
        """Whether its program may still run."""
        return self.control is not None and self.code is None

    def failure(self, rank: int) -> str:
        """How it failed, for people."""
        where = f"rank {rank} on {self.name}"
        if self.code is None:
            return f"{where} is gone: its process {self.pid} was killed, or its host"
        if self.code < 0:
            return f"{where} was killed by signal {-self.code} ({signal.strsignal(-self.code)})"
        return f"{where} failed with exit code {self.code}{': ' if self.why else ''}{self.why}"


class Launch:
    """One run of a program in several processes.

    Args:
        program: As `program_of` gives it.
        deadline_s: Deadline for all members to start; also the default deadline of their `replica_group()`.
        hosts: mpiexec's `-hosts`; None: this host.
        grace_s: Time for the others to end by themselves once one has failed, or the launch was interrupted.

    Raises:
        NotInstalled: mpi4py or MPICH's mpiexec is not installed.
    """

    def __init__(
        self, size: int, program: Sequence[str], deadline_s: float, hosts: str | None = None, grace_s: float = 5.0
    ) -> None:
        self._members = [_Member() for _ in range(size)]
        self._deadline_s, self._grace_s, self._hosts = deadline_s, grace_s, hosts
        self._listener = socket.create_server(("" if hosts else "127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        here = own_addresses() if hosts else ("127.0.0.1",)
        address = {ADDRESS: json.dumps([here, self._listener.getsockname()[1]]), TOKEN: self._token}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._began = time.monotonic()
        self._first_failure: float | None = None
        self._kill_at: float | None = None
        self._signalled = 0
        self._killed = False
        self._mpiexec_output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the launch
        self._mpiexec = subprocess.Popen(
            [*_command(size, hosts), sys.executable, "-m", "elastable.launch.member", *program],
            stdin=subprocess.DEVNULL,
            stdout=self._mpiexec_output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **address, DEADLINE_VARIABLE: str(deadline_s)},
            start_new_session=True,  # Ctrl-C reaches this process alone, which signals the members
        )

    def run(self) -> None:
        """Waits until all members have ended.

        Raises:
            ElastableError: a member failed; the message names its rank, the class follows its exit code.
            KeyboardInterrupt: it was interrupted, or terminated.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._mpiexec.poll() is None and not self._killed:
                if all(member.pid and not member.running for member in self._members):
                    break
                self._step()
            self._release()
            end = time.monotonic() + _LAST_LINES_S
            while len(self._selector.get_map()) > 1 and time.monotonic() < end:
                self._step()
        finally:
            self._end_now()
            self._release()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            self._listener.close()
        self._raise_failures()

    def _step(self) -> None:
        self._take()
        self._end_when_due()

    def _take(self) -> None:
        """Takes what has come from members, if anything comes soon."""
        for key, _ in self._selector.select(_TICK_S):
            key.data()

    def _accept(self) -> None:
        """The next connection, unless its first message has no valid token."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        connection.settimeout(_HELLO_S)
        hello: Message | None = None
        with suppress(OSError, ValueError):
            hello = json.loads(read_line(connection))
        if not isinstance(hello, dict) or hello.get("token") != self._token:
            connection.close()
            return
        connection.setblocking(False)
        rank, channel = hello["rank"], hello["channel"]
        if channel == "control":
            member = self._members[rank]
            member.pid, member.host, member.name = hello["pid"], hello["host"], hello["name"]
            member.control = connection
            take = partial(self._hear, member, _Lines(connection))
        else:
            into = sys.stdout.buffer if channel == "out" else sys.stderr.buffer
            take = partial(self._show, f"[{rank}] ".encode(), into, _Lines(connection, _LONGEST_LINE))
        self._selector.register(connection, selectors.EVENT_READ, take)

    def _show(self, prefix: bytes, into: BinaryIO, written: "_Lines") -> None:
        """Shows what a member has written, line by line with its rank."""
        for line in written.come():
            into.write(prefix + line + b"\n")
        into.flush()
        if written.ended:
            self._close(written.connection)

    def _hear(self, member: _Member, messages: "_Lines") -> None:
        for line in messages.come():
            end = json.loads(line)
            member.code, member.why = end["ended"], end["why"]
        if messages.ended:
            self._drop(member)
        if (messages.ended and member.code is None) or member.code:
            now = time.monotonic()
            member.failed_at = now if member.failed_at is None else member.failed_at
            self._first_failure = now if self._first_failure is None else self._first_failure

    def _drop(self, member: _Member) -> None:
        if member.control is not None:
            self._close(member.control)
            member.control = None

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signalled += 1
        if self._signalled == 1:
            sys.stderr.write("ending all replicas; once more to end them at once\n")
            self._signal_all(number)
            self._first_failure = self._first_failure or time.monotonic()
        else:
            self._kill_at = time.monotonic()

    def _end_when_due(self) -> None:
        now = time.monotonic()
        late = now - self._began > self._deadline_s and not all(member.pid for member in self._members)
        if self._first_failure is None and late:
            self._first_failure = now - self._grace_s
        if self._first_failure is not None and self._kill_at is None and now - self._first_failure > self._grace_s:
            self._end_running(signal.SIGTERM)
            self._kill_at = now + _TERM_S
        if self._kill_at is not None and now > self._kill_at:
            self._end_now()

    def _signal_all(self, number: int) -> None:
        for member in self._members:
            if member.control is not None:
                with suppress(OSError):
                    member.control.send(json.dumps({"signal": int(number)}).encode() + b"\n")

    def _end_running(self, number: int) -> None:
        for member in self._members:
            member.ended_by_us |= member.running
        self._signal_all(number)

    def _end_now(self) -> None:
        """Kills the programs that still run."""
        self._end_running(signal.SIGKILL)
        end = time.monotonic() + _TERM_S
        while not self._killed and time.monotonic() < end and any(member.running for member in self._members):
            self._take()
        self._killed = True

    def _release(self) -> None:
        """Ends the monitors, and with them mpiexec; kills what does not end."""
        here = this_host()
        for member in self._members:
            self._drop(member)
        with suppress(subprocess.TimeoutExpired):
            self._mpiexec.wait(_TERM_S)
        for member in self._members:
            if self._mpiexec.poll() is None and member.host == here and member.pid:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._mpiexec.poll() is None:
                os.killpg(self._mpiexec.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._mpiexec.wait(_TERM_S)

    def _raise_failures(self) -> None:
        """Raises if a member failed or did not start."""
        self._mpiexec_output.seek(0)
        output = self._mpiexec_output.read().decode(errors="replace").strip()
        self._mpiexec_output.close()
        if self._signalled:
            raise KeyboardInterrupt
        failed = [(one.caused, one.failed_at, rank) for rank, one in enumerate(self._members) if not one.ended_by_us]
        failures = sorted((caused, at, rank) for caused, at, rank in failed if at is not None)
        hung = [str(rank) for rank, member in enumerate(self._members) if member.ended_by_us]
        note = f"; rank {', '.join(hung)} did not end, and was killed" if hung else ""
        if failures:
            rank = failures[0][2]
            member = self._members[rank]
            kind = JobFailed if member.code is None else error_of(member.code)
            raise kind(f"{member.failure(rank)}{note}")
        missing = [str(rank) for rank, member in enumerate(self._members) if not member.pid]
        if missing:
            names = f"; every host must resolve {socket.gethostname()} and the names of --hosts" if self._hosts else ""
            raise JobFailed(f"rank {', '.join(missing)} did not start{names}; mpiexec says: {output or 'nothing'}")


def _command(size: int, hosts: str | None) -> Sequence[str]:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists() or find_spec("mpi4py") is None:
        raise NotInstalled('elastable replicas needs mpi4py and MPICH: pip install "elastable[replicas]"')
    # Without the flag mpiexec kills all members when one fails, before they could report it and save what they have.
    command = [str(mpiexec), "-disable-auto-cleanup", "-n", str(size)]
    return [*command, "-hosts", hosts] if hosts else command


class _Lines:
    """The lines that come over a connection.

    Args:
        longest: Bytes after which a line is cut; 0: none is.
    """

    def __init__(self, connection: socket.socket, longest: int = 0) -> None:
        self.connection, self._longest = connection, longest
        self._begun, self.ended = b"", False

    def come(self) -> list[bytes]:
        """Those that have come, once the connection can be read; at its end also what is left."""
        try:
            piece = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            piece = b""
        self.ended = not piece
        *lines, self._begun = (self._begun + piece).split(b"\n")
        if self._begun and self._longest and (self.ended or len(self._begun) > self._longest):
            lines.append(self._begun)
            self._begun = b""
        return lines
