"""Store servers on this machine, started and ended with a job."""

from __future__ import annotations

import re
import secrets
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.option import command_words
from elastable.embedding_store.support.store_url import SERVERS, url_of_server
from elastable.embedding_store.wire.access.credentials import (
    GIVEN_ADMINISTRATOR_TOKEN,
    GIVEN_TOKEN,
    STORES_TOKEN,
    Credentials,
)
from elastable.jobs.servers.server_options import StoreServerOptions
from elastable.process.child import start_elastable
from elastable.process.exit_codes import error_of

__all__ = ["LocalStores", "StoreAccess"]

_START_S = 300.0
_STOP_S = 30.0
_ADDRESS = re.compile(rb"store server at (\S+), store")


class LocalStores:
    """Processes of `elastable store`, each with its own log file and a part of the job's `--store`.

    They run in their own sessions, so that Ctrl-C reaches the master alone. They end when the master's process does,
    also by SIGKILL.

    Args:
        count: How many.
        options: Of each, with the job's store.
        logs: Directory for the log files.
        access: Who may call them.

    Raises:
        ElastableError: a server did not start; with the end of its log.
    """

    def __init__(self, count: int, options: StoreServerOptions, logs: Path, access: StoreAccess) -> None:
        self._logs = [logs / f"store-{number}.log" for number in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, log in enumerate(self._logs):
                server = replace(options, store=url_of_server(options.store, number))
                words = ["store", *command_words(server)]
                self._processes.append(start_elastable(words, log, {"PYTHONUNBUFFERED": "1", **access.servers}))
            self.url = SERVERS + ",".join(self._address(number) for number in range(len(self._logs)))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Process ids, in order."""
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        """Ends the servers, once they have written what their stores keep."""
        for process in self._processes:
            process.terminate()
        give_up = time.monotonic() + _STOP_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.05, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdin.close()  # type: ignore[union-attr]

    def _address(self, number: int) -> str:
        """Where the server listens, once it says so."""
        process, log = self._processes[number], self._logs[number]
        give_up = time.monotonic() + _START_S
        while time.monotonic() < give_up:
            ended = process.poll()  # before its log is read: it may say why
            if found := _ADDRESS.search(log.read_bytes()):
                return found[1].decode()
            if ended is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
                raise error_of(ended)(f"store server {number} did not start; the last lines of {log}:\n{tail}")
            time.sleep(0.05)
        raise StoreFailed(f"store server {number} did not start within {_START_S:g} s; see {log}")


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
            {
                **dict.fromkeys((*_OTHERS, _ROLES), ""),
                GIVEN_ADMINISTRATOR_TOKEN: administrator,
                GIVEN_TOKEN: worker,
            },
            {STORES_TOKEN: worker},
        )
