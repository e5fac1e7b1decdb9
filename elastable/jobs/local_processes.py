"""Workers and store servers on this machine, started and ended with a job."""

import re
import secrets
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from elastable.embedding_store.errors import JobFailed, StoreFailed
from elastable.embedding_store.option import command_words
from elastable.embedding_store.support.store_url import SERVERS, url_of_server
from elastable.embedding_store.wire.access.credentials import (
    GIVEN_ADMINISTRATOR_TOKEN,
    GIVEN_TOKEN,
    STORES_TOKEN,
    Credentials,
)
from elastable.jobs.options import StoreServerOptions, WorkerOptions
from elastable.process.child import EndedChild, start_elastable
from elastable.process.exit_codes import error_of

_WORKERS_LEAVE_S = 20.0
_WORKERS_END_S = 5.0
_STORES_START_S = 300.0
_STORES_END_S = 30.0
_ADDRESS = re.compile(rb"store server at (\S+), store")


class _Processes:
    """Processes of this command, each with its own log file.

    They run in their own sessions, so that Ctrl-C reaches the master alone. They end when the master's process does,
    also by SIGKILL.
    """

    def __init__(
        self, name: str, commands: Iterable[Sequence[str]], logs: Path, environment: Mapping[str, str] | None
    ) -> None:
        self._logs: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for number, words in enumerate(commands):
            self._logs.append(logs / f"{name}-{number}.log")
            self._processes.append(start_elastable(words, self._logs[-1], environment))

    def __enter__(self) -> Self:
        return self

    @property
    def pids(self) -> list[int]:
        """Process ids, in order."""
        return [process.pid for process in self._processes]

    def _end_of_log(self, number: int) -> str:
        tail = "\n".join(self._logs[number].read_text(errors="replace").splitlines()[-8:])
        return f"the last lines of {self._logs[number]}:\n{tail}"

    def _end(self, leave_s: float, end_s: float) -> None:
        """Lets them end by themselves for `leave_s` seconds, then terminates them, and kills them after `end_s`."""
        for seconds, make_end in ((leave_s, subprocess.Popen.terminate), (end_s, subprocess.Popen.kill)):
            give_up = time.monotonic() + seconds
            for process in self._processes:
                try:
                    process.wait(timeout=max(0.0, give_up - time.monotonic()))
                except subprocess.TimeoutExpired:
                    make_end(process)
        for process in self._processes:
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]


class LocalWorkers(_Processes):
    """Processes of `elastable worker`; they end at once when the master's process does.

    Args:
        options: Of each; the first alone makes a profile.
        environment: Variables in which their environment differs from this process'.
    """

    def __init__(
        self, count: int, options: WorkerOptions, logs: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        others = replace(options, profile=None)  # two profilers of one host would write to one file
        each = [options, *[others] * (count - 1)]
        super().__init__("worker", [["worker", *command_words(of)] for of in each], logs, environment)
        self._reported: set[int] = set()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._end(_WORKERS_LEAVE_S if kind is None else 2.0, _WORKERS_END_S)

    def failed(self) -> list[EndedChild]:
        """Those that have ended, but not with exit code 0, in order."""
        ended = zip(self._processes, self._logs, strict=True)
        return [EndedChild(it.pid, code, log) for it, log in ended if (code := it.poll())]

    def newly_dead(self) -> list[str]:
        """A line for every worker that failed since the last call."""
        new = [worker for worker in self.failed() if worker.pid not in self._reported]
        self._reported |= {worker.pid for worker in new}
        return [f"worker {self.pids.index(worker.pid)} (pid {worker.pid}) {worker}" for worker in new]

    def require_some_alive(self) -> None:
        """Refuses to go on when every worker is gone.

        Raises:
            ElastableError: with the end of a log; of the kind that all workers failed with, or `JobFailed` where they
                differ or were killed.
        """
        codes = [process.poll() for process in self._processes]
        if codes and None not in codes:
            number = next((n for n, code in enumerate(codes) if code), 0)
            failed = {code for code in codes if code}
            kind = error_of(failed.pop()) if len(failed) == 1 else JobFailed
            raise kind(f"every worker has ended before the job; {self._end_of_log(number)}")


class LocalStores(_Processes):
    """Processes of `elastable store`, each with a part of the job's `--store`.

    Args:
        options: Of each, with the job's store.
        access: Who may call them.

    Raises:
        ElastableError: a server did not start; with the end of its log.
    """

    def __init__(self, count: int, options: StoreServerOptions, logs: Path, access: "StoreAccess") -> None:
        each = [replace(options, store=url_of_server(options.store, number)) for number in range(count)]
        environment = {"PYTHONUNBUFFERED": "1", **access.servers}
        try:
            super().__init__("store", [["store", *command_words(of)] for of in each], logs, environment)
            self.url = SERVERS + ",".join(self._address(number) for number in range(count))
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the servers, once they have written what their stores keep."""
        self._end(0.0, _STORES_END_S)

    def _address(self, number: int) -> str:
        """Where the server listens, once it says so."""
        process, log = self._processes[number], self._logs[number]
        give_up = time.monotonic() + _STORES_START_S
        while time.monotonic() < give_up:
            ended = process.poll()  # before its log is read: it may say why
            if found := _ADDRESS.search(log.read_bytes()):
                return found[1].decode()
            if ended is not None:
                raise error_of(ended)(f"store server {number} did not start; {self._end_of_log(number)}")
            time.sleep(0.05)
        raise StoreFailed(f"store server {number} did not start within {_STORES_START_S:g} s; see {log}")


# Who may call the store servers that a command starts on this machine: the processes of its run, and nobody else


# What the environment says of roles is for servers that outlive a run.
_OTHERS = ("ELASTABLE_TOKEN_FILE", "ELASTABLE_WORKER_TOKEN_FILE", "ELASTABLE_READER_TOKEN_FILE")
_ROLES = "ELASTABLE_CERTIFICATE_ROLES"


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Tokens for the store servers of one run, made for it whatever else is configured; TLS stays as it is.

    They are passed in environments, which only this user's processes can read: on a command line every user of the
    host would see them.

    Attributes:
        credentials: Of the master as a client of the store servers: their administrator.
        servers: Variables in which the environment of the store servers differs from the master's.
        workers: Likewise, of the run's workers.
    """

    credentials: Credentials
    servers: Mapping[str, str] = field(repr=False)
    workers: Mapping[str, str] = field(repr=False)

    @classmethod
    def for_run(cls, given: Credentials | None = None) -> Self:
        """New tokens.

        Args:
            given: Whose certificates the master shows; None: those of the environment.
        """
        given = Credentials.from_environment() if given is None else given
        administrator, worker = secrets.token_hex(32), secrets.token_hex(32)
        return cls(
            replace(given, token=administrator, worker_token=None, reader_token=None),
            {**dict.fromkeys((*_OTHERS, _ROLES), ""), GIVEN_ADMINISTRATOR_TOKEN: administrator, GIVEN_TOKEN: worker},
            {STORES_TOKEN: worker},
        )
