"""What an engine does for a job, and the one that every machine has.

An engine starts processes, says where they listen, starts them again where it can, ends them, and brings their logs.
"""

import re
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from elastable.embedding_store.errors import JobFailed, StoreFailed
from elastable.process.child import EndedChild, start_elastable
from elastable.process.exit_codes import error_of

_START_S = 300.0
_FAILED_LEAVE_S = 2.0  # of processes whose job has failed
_ADDRESS = re.compile(rb"^(?:master|store server) at (\S+),\s+store", re.MULTILINE)
_HEAD_BYTES = 1 << 16  # of a log; the address stands in its first lines


@dataclass(frozen=True, slots=True)
class Command:
    """What one process runs: `elastable WORDS`.

    Attributes:
        words: The command and its options.
        again: Those of every start but the first, where the engine starts a process again; (): the same.
        peers: Option -> role: the option names a file with the addresses of that role (`Processes.tell`).
        environment: Variables in which its environment differs from the one that the engine gives its processes.
    """

    words: Sequence[str]
    again: Sequence[str] = ()
    peers: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it was seen last.

    Attributes:
        pid: On its machine; 0: it has not begun.
        code: Its exit code (-n: by signal n) once it has ended for good; None: it runs, or is to be started again.
        address: `host:port` where it says that it listens; None: nowhere yet.
    """

    pid: int = 0
    code: int | None = None
    address: str | None = None


class Processes(AbstractContextManager["Processes"]):
    """Processes of one role, numbered from 0.

    They end with the block, and with the process that started them, however that ends.

    Args:
        role: "worker", "store" or "master"; their logs are `ROLE-NUMBER.log`.
        logs: File in which the log of each arrives on this machine, in order.
        leave_s, end_s: Seconds in which they leave by themselves at the end of the block, and then once told to.

    Attributes:
        logs: As given.
    """

    def __init__(self, role: str, logs: Sequence[Path], leave_s: float, end_s: float) -> None:
        self.role, self.logs, self._leave_s, self._end_s = role, logs, leave_s, end_s
        self._reported: set[int] = set()

    @abstractmethod
    def look(self) -> Sequence[Seen]:
        """Each process as it is now, in order; logs have arrived up to here."""

    @abstractmethod
    def tell(self, role: str, addresses: Sequence[str]) -> None:
        """Writes the addresses of a role, by number, into the files of `Command.peers`; from the next `look` on."""

    @abstractmethod
    def interrupt(self) -> None:
        """What Ctrl-C does."""

    @abstractmethod
    def end(self, leave_s: float, end_s: float) -> None:
        """Lets them end by themselves for `leave_s` seconds, then terminates them, and kills them after `end_s`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.end(self._leave_s if kind is None else min(self._leave_s, _FAILED_LEAVE_S), self._end_s)

    def end_of_log(self, number: int) -> str:
        """The last lines that a process wrote."""
        tail = "\n".join(self.logs[number].read_text(errors="replace").splitlines()[-8:])
        return f"the last lines of {self.logs[number]}:\n{tail}"

    def failed(self) -> list[EndedChild]:
        """Those that have ended, but not with exit code 0, in order."""
        return [EndedChild(it.pid, it.code, log) for it, log in zip(self.look(), self.logs, strict=True) if it.code]

    def newly_dead(self) -> list[str]:
        """A line for every process that failed since the last call."""
        lines = []
        for number, (it, log) in enumerate(zip(self.look(), self.logs, strict=True)):
            if it.code and number not in self._reported:
                self._reported.add(number)
                lines.append(f"{self.role} {number} (pid {it.pid}) {EndedChild(it.pid, it.code, log)}")
        return lines

    def require_some_alive(self) -> None:
        """Refuses to go on when every process is gone.

        Raises:
            ElastableError: with the end of a log; of the kind that all failed with, or `JobFailed` where they differ or
                were killed.
        """
        codes = [it.code for it in self.look()]
        if codes and None not in codes:
            number = next((n for n, code in enumerate(codes) if code), 0)
            failed = {code for code in codes if code}
            kind = error_of(failed.pop()) if len(failed) == 1 else JobFailed
            raise kind(f"every {self.role} has ended before the job; {self.end_of_log(number)}")

    def addresses(self) -> list[str]:
        """Where they listen, once all of them say so.

        Raises:
            ElastableError: one has ended, or says nothing for five minutes; with the end of its log.
        """
        give_up = time.monotonic() + _START_S
        while time.monotonic() < give_up:
            seen = self.look()
            for number, it in enumerate(seen):
                if it.code is not None:
                    raise error_of(it.code)(f"{self.role} {number} did not start; {self.end_of_log(number)}")
            if all(it.address for it in seen):
                return [str(it.address) for it in seen]
            time.sleep(0.05)
        silent = [n for n, it in enumerate(seen) if not it.address]
        raise StoreFailed(f"{self.role} {silent[0]} did not start within {_START_S:g} s; see {self.logs[silent[0]]}")


class Engine(AbstractContextManager["Engine"]):
    """Starts processes. What it has started ends with the block."""

    @abstractmethod
    def start(self, role: str, commands: Sequence[Command], leave_s: float, end_s: float) -> Processes:
        """Starts a process for each command; the arguments are those of `Processes`."""

    def __exit__(self, *raised: object) -> None:
        """Nothing to let go of."""


def _listening_address(log: Path) -> str | None:
    """Where the process that writes a log says that it listens; None: it has not said so yet."""
    with log.open("rb") as written:
        found = _ADDRESS.search(written.read(_HEAD_BYTES))
    return None if found is None else found[1].decode("ascii", "replace")


# Child processes of this one; engines that run on several machines start theirs in this way there, too


class LocalProcess:
    """One process of this command in a session of its own, so that Ctrl-C reaches its parent alone.

    Args:
        command: What it runs.
        log: File for everything that it writes; the files of its peers' addresses lie next to it.
        again: Whether it was started before.
    """

    def __init__(self, command: Command, log: Path, again: bool = False) -> None:
        self._log = log
        self._files = {role: log.with_suffix(f".{role}") for role in command.peers.values()}
        self._told: dict[str, str] = {}
        self.tell(dict.fromkeys(self._files, ""))
        named = [word for option, role in command.peers.items() for word in (option, f"file://{self._files[role]}")]
        words = command.again if again and command.again else command.words
        self._process = start_elastable([*words, *named], log, command.environment)

    def look(self) -> Seen:
        """How it is now."""
        return Seen(self._process.pid, self._process.poll(), _listening_address(self._log))

    def tell(self, peers: Mapping[str, str]) -> None:
        """Writes addresses of peers, role -> `host:port,...`, where they have changed; a reader sees whole files."""
        for role, file in self._files.items():
            if role in peers and peers[role] != self._told.get(role):
                draft = file.with_suffix(".draft")
                draft.write_text(peers[role])
                draft.replace(file)
                self._told[role] = peers[role]

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Until it has ended, for so long at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, seconds))

    def reap(self) -> None:
        """Waits for its end; there is nobody then who could see this process end (`when_parent_ends`)."""
        self._process.wait()
        self._process.stdin.close()  # type: ignore[union-attr]


def end_all(processes: Sequence[LocalProcess], leave_s: float, end_s: float) -> None:
    """As `Processes.end`, of all at once."""
    for seconds, number in ((leave_s, signal.SIGTERM), (end_s, signal.SIGKILL)):
        give_up = time.monotonic() + seconds
        for process in processes:
            process.wait(give_up - time.monotonic())
            if process.look().code is None:
                process.send(number)
    for process in processes:
        process.reap()


class LocalProcesses(Processes):
    """Child processes of this one; one that ends is not started again."""

    def __init__(self, role: str, commands: Sequence[Command], folder: Path, leave_s: float, end_s: float) -> None:
        super().__init__(role, [folder / f"{role}-{n}.log" for n in range(len(commands))], leave_s, end_s)
        self._processes: list[LocalProcess] = []
        for command, log in zip(commands, self.logs, strict=True):
            self._processes.append(LocalProcess(command, log))

    def look(self) -> Sequence[Seen]:
        return [process.look() for process in self._processes]

    def tell(self, role: str, addresses: Sequence[str]) -> None:
        for process in self._processes:
            process.tell({role: ",".join(addresses)})

    def interrupt(self) -> None:
        for process in self._processes:
            process.send(signal.SIGINT)

    def end(self, leave_s: float, end_s: float) -> None:
        end_all(self._processes, leave_s, end_s)


class LocalEngine(Engine):
    """Starts child processes, with their logs in a folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def start(self, role: str, commands: Sequence[Command], leave_s: float, end_s: float) -> LocalProcesses:
        return LocalProcesses(role, commands, self._logs, leave_s, end_s)
