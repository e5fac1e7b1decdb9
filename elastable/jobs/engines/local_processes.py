"""The engine that every machine has: child processes of this one. Others run theirs, on their machines, in this way."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from elastable.jobs.engines.engine import Command, Engine, Processes, Seen, listening_address
from elastable.process.child import start_elastable


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
        return Seen(self._process.pid, self._process.poll(), listening_address(self._log))

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
