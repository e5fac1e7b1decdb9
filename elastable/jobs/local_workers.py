"""Worker processes on this machine, started and ended with a job."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from elastable.embedding_store.errors import JobFailed
from elastable.embedding_store.option import command_words
from elastable.jobs.options import WorkerOptions
from elastable.process.child import EndedChild, start_elastable
from elastable.process.exit_codes import error_of

__all__ = ["LocalWorkers"]

_STOP_WAIT_S = 20.0


class LocalWorkers:
    """Processes of `elastable worker`, each with its own log file.

    They run in their own sessions, so that Ctrl-C reaches the master alone, which then ends the job for all. They end
    at once when the master's process does, also by SIGKILL.

    Args:
        count: Number of processes.
        options: Of each; the first alone makes a profile.
        logs: Directory for the log files.
        environment: Variables in which their environment differs from this process'.
    """

    def __init__(
        self, count: int, options: WorkerOptions, logs: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._logs = [logs / f"worker-{number}.log" for number in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reported: set[int] = set()
        for log in self._logs:
            self._processes.append(start_elastable(["worker", *command_words(options)], log, environment))
            options = replace(options, profile=None)  # two profilers of one host would write to one file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(wait_s=_STOP_WAIT_S if error is None else 2.0)

    @property
    def pids(self) -> list[int]:
        """Process ids, in order."""
        return [process.pid for process in self._processes]

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
            tail = "\n".join(self._logs[number].read_text(errors="replace").splitlines()[-8:])
            raise kind(f"every worker has ended before the job; the last lines of {self._logs[number]}:\n{tail}")

    def stop(self, wait_s: float) -> None:
        """Lets the workers end by themselves for `wait_s` seconds, then ends them."""
        give_up = time.monotonic() + wait_s
        for process in self._processes:
            try:
                process.wait(timeout=max(0.05, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=5.0)
            process.stdin.close()  # type: ignore[union-attr]
