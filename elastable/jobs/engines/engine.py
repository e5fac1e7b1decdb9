"""What an engine does for a job: starts processes, says where they listen, starts them again, ends them, keeps logs."""

import re
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from elastable.embedding_store.errors import JobFailed, StoreFailed
from elastable.process.child import EndedChild
from elastable.process.exit_codes import error_of

_START_S = 300.0
_FAILED_LEAVE_S = 2.0  # of processes whose job has failed
_ADDRESS = re.compile(rb"^(?:master|store server) at (\S+), store", re.MULTILINE)
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


def listening_address(log: Path) -> str | None:
    """Where the process that writes a log says that it listens; None: it has not said so yet."""
    with log.open("rb") as written:
        found = _ADDRESS.search(written.read(_HEAD_BYTES))
    return None if found is None else found[1].decode("ascii", "replace")
