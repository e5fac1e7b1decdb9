"""The contenders that train the click model: plain Keras, and a master with one worker, in separate processes.

All of them are started first and take turns: those not being measured are idle,
so a machine that is slow for a minute is slow for all.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Self

from benchmarks.click_job.sizes import BATCH
from elastable.embedding_store.errors import Unavailable
from elastable.master.wire.client import MasterClient

__all__ = ["Contender", "Elastable", "PlainKeras"]

_ROOT = Path(__file__).parents[2]
_START_S = 240.0
_WARM_STEPS = 80  # every batch that was drawn has been seen, so rows are not first touches
_SETTLE_S = 0.3  # caches that others have filled meanwhile


class Contender(ABC):
    """Trains the click model, a while at a time; to be closed."""

    @abstractmethod
    def start(self) -> None:
        """Begins with importing, building and compiling; returns at once."""

    @abstractmethod
    def warm_up(self) -> None:
        """Waits until steps have been made, and pauses."""

    @abstractmethod
    def examples_per_second(self, seconds: float) -> float:
        """Trains for about that long, and pauses."""

    @abstractmethod
    def close(self) -> None:
        """Ends its processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PlainKeras(Contender):
    """`keras.layers.Embedding` and `model.fit`, with TensorFlow's own choice of threads."""

    def __init__(self, rows: int, optimizer: str, home: Path) -> None:
        self._environment = _environment(rows, optimizer)
        self._log = home / "keras.log"
        self._seconds_a_step = 0.0

    def start(self) -> None:
        """As in `Contender.start`."""
        self._process = _launch(["-m", "benchmarks.click_job.plain_keras"], self._environment, self._log, pipes=True)

    def warm_up(self) -> None:
        """As in `Contender.warm_up`."""
        self._train(3)
        self._seconds_a_step = self._train(3) / 3

    def examples_per_second(self, seconds: float) -> float:
        """As in `Contender.examples_per_second`."""
        self._train(max(1, int(_SETTLE_S / self._seconds_a_step)))
        steps = max(3, int(seconds / self._seconds_a_step))
        self._seconds_a_step = self._train(steps) / steps
        return BATCH / self._seconds_a_step

    def close(self) -> None:
        """As in `Contender.close`."""
        _kill([self._process])

    def _train(self, steps: int) -> float:
        """Trains so many steps; the seconds they took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n".encode())
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"plain Keras has ended; see {self._log}:\n{_tail(self._log)}")
        return float(answer)


class Elastable(Contender):
    """One `elastable master` with the memory store, and one `elastable worker`; `more` are options of the master."""

    def __init__(self, rows: int, optimizer: str, threads: int, home: Path, more: Sequence[str] = ()) -> None:
        self._environment = _environment(rows, optimizer)
        self._threads = threads
        self._home = home
        self._more = list(more)
        self.address = f"127.0.0.1:{_free_port()}"
        self._client = MasterClient(self.address, deadline_s=_START_S)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """As in `Contender.start`."""
        model = str(Path(__file__).with_name("model.py"))
        job = [model, "--micro-batch-size", str(BATCH), "--no-shuffle"]
        job += ["--grads-to-wait", "1", "--intra-op-threads", str(self._threads), "--no-export"]
        places = [*self._more, "--listen", self.address, "--run-dir", str(self._home / f"runs-{self._threads}")]
        roles = {"master": [*job, *places], "worker": [model, "--master", self.address, "--deadline", str(_START_S)]}
        for role, arguments in roles.items():
            log = self._home / f"{role}-{self._threads}.log"
            self.processes.append(_launch(["-m", "elastable", role, *arguments], self._environment, log))

    def warm_up(self) -> None:
        """As in `Contender.warm_up`."""
        give_up = time.monotonic() + _START_S
        while self.version() < _WARM_STEPS:
            if time.monotonic() > give_up:
                raise RuntimeError(f"not warm after {_START_S} s; see {self._home}")
            time.sleep(0.1)
        self._signal(signal.SIGSTOP)

    def examples_per_second(self, seconds: float) -> float:
        """As in `Contender.examples_per_second`."""
        with self.running():
            return self.measured(seconds)

    def measured(self, seconds: float) -> float:
        """Examples/s of about that long, within a turn."""
        time.sleep(_SETTLE_S)
        first, began = self.version(), time.perf_counter()
        time.sleep(seconds)
        last, ended = self.version(), time.perf_counter()
        return (last - first) * BATCH / (ended - began)

    def close(self) -> None:
        """As in `Contender.close`."""
        self._client.close()
        _kill(self.processes)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Its turn: outside of it its processes are stopped."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def version(self) -> int:
        """The version that it has come to."""
        for process in self.processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}; see {self._home}")
        try:
            return self._client.status().version
        except Unavailable:
            return 0


def _launch(
    arguments: Sequence[str], environment: dict[str, str], log: Path, pipes: bool = False
) -> subprocess.Popen[bytes]:
    pipe: int | None = subprocess.PIPE if pipes else subprocess.DEVNULL
    with log.open("wb") as errors:
        output: int | IO[bytes] | None = subprocess.PIPE if pipes else errors
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=_ROOT, env=environment, stdin=pipe, stdout=output, stderr=errors
        )


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    # Not asked to end: a master would first write a checkpoint of all its rows.
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=30.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _environment(rows: int, optimizer: str) -> dict[str, str]:
    return {**os.environ, "CLICK_ROWS": str(rows), "CLICK_OPTIMIZER": optimizer, "TF_CPP_MIN_LOG_LEVEL": "3"}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-8:])


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
