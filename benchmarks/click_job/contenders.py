"""The contenders that train the click model: plain Keras, and a master with one worker, in separate processes.

All of them are started first and take turns: those not being measured are idle,
so a machine that is slow for a minute is slow for all.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.click_job.contender import Contender
from benchmarks.click_job.draws import RECORDS
from benchmarks.click_job.sizes import BATCH
from elastable.embedding_store.errors import Unavailable
from elastable.master.rpc.client import MasterClient
from tests.ports import free_address

_ROOT = Path(__file__).parents[2]
_START_S = 240.0
_MORE_STEPS = 16  # than batches that were drawn: every one has been seen, so rows are not first touches
_SETTLE_S = 0.3  # caches that others have filled meanwhile


class StepCounter(Contender):
    """A program that reads step counts, a line each, and answers with the steps that it made and their seconds.

    Args:
        command: The program; it runs in the root of the project.
        environment: Its variables.
        log: Where its standard error goes.

    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command, self._environment, self._log = command, environment, log
        self._seconds_a_step = 0.0

    def start(self) -> None:
        self._process = _launch(self._command, self._environment, self._log, pipes=True)

    def warm_up(self) -> None:
        self._train(3)
        self._seconds_a_step = self._train(3)

    def examples_per_second(self, seconds: float) -> float:
        self._train(max(1, int(_SETTLE_S / self._seconds_a_step)))
        self._seconds_a_step = self._train(max(3, int(seconds / self._seconds_a_step)))
        return BATCH / self._seconds_a_step

    def close(self) -> None:
        _kill([self._process])

    def _train(self, steps: int) -> float:
        """Trains at least so many steps; the seconds that one took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n".encode())
        self._process.stdin.flush()
        while (answer := self._process.stdout.readline()) and not answer.startswith(b"{"):
            pass  # what a library prints while it is imported
        if not answer:
            raise RuntimeError(f"{self._command} has ended; see {self._log}:\n{_tail(self._log)}")
        made = json.loads(answer)
        return float(made["seconds"]) / int(made["steps"])


def plain_keras(rows: int, optimizer: str, home: Path) -> StepCounter:
    """`keras.layers.Embedding` and `model.fit`, with TensorFlow's own choice of threads."""
    command = [sys.executable, "-m", "benchmarks.click_job.plain_keras"]
    return StepCounter(command, click_variables(rows, optimizer), home / "keras.log")


def dense_step(optimizer: str, home: Path) -> StepCounter:
    """The dense part alone, over rows that are there already."""
    command = [sys.executable, "-m", "benchmarks.click_job.dense_step"]
    return StepCounter(command, click_variables(0, optimizer), home / "dense.log")


@dataclass
class Job(Contender):
    """One `elastable master`, and its workers.

    Attributes:
        name: Of its logs and run directory.
        model: The model file.
        examples: Of one version.
        options: Of the master.
        home: A folder for logs and run directories.
        environment: Variables of all its processes.
        workers: How many there are.
        warm: Versions that are made before the first turn.
        stores: Store servers of the job; 0: the master holds its rows.
        transport: Of workers, master and store servers.
        of_workers: More options of every worker.
        address: Of the master.
        processes: The store servers', the master's, then the workers'.
    """

    name: str
    model: Path
    examples: int
    options: Sequence[str]
    home: Path
    environment: Mapping[str, str]
    workers: int
    warm: int
    stores: int = 0
    transport: str = "auto"
    of_workers: Sequence[str] = ()
    address: str = field(default_factory=free_address)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._client = MasterClient(self.address, deadline_s=_START_S)

    def start(self) -> None:
        places = ["--listen", self.address, "--run-dir", str(self.home / f"runs-{self.name}"), "--no-export"]
        stores = [free_address() for _ in range(self.stores)]
        if stores:
            places += ["--stores", ",".join(stores)]
        roles = {f"store-{number}": ["store", "--listen", each] for number, each in enumerate(stores)}
        roles["master"] = ["master", str(self.model), *self.options, *places]
        for number in range(self.workers):
            arguments = ["worker", str(self.model), "--master", self.address, "--deadline", str(_START_S)]
            roles[f"worker-{number}"] = [*arguments, *self.of_workers]
        for role, arguments in roles.items():
            log = self.home / f"{role}-{self.name}.log"
            command = [sys.executable, "-m", "elastable", *arguments, "--transport", self.transport]
            self.processes.append(_launch(command, self.environment, log))

    def warm_up(self) -> None:
        give_up = time.monotonic() + _START_S
        while self.version() < self.warm:
            if time.monotonic() > give_up:
                raise RuntimeError(f"not warm after {_START_S} s; see {self.home}")
            time.sleep(0.1)
        self._signal(signal.SIGSTOP)

    def examples_per_second(self, seconds: float) -> float:
        with self.running():
            return self.measured(seconds)

    def measured(self, seconds: float) -> float:
        """Examples/s of about that long, within a turn."""
        time.sleep(_SETTLE_S)
        first, began = self.version(), time.perf_counter()
        time.sleep(seconds)
        last, ended = self.version(), time.perf_counter()
        return (last - first) * self.examples / (ended - began)

    def close(self) -> None:
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
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}; see {self.home}")
        try:
            return self._client.status().version
        except Unavailable:
            return 0


def click_job(
    name: str,
    rows: int,
    optimizer: str,
    home: Path,
    options: Sequence[str] = (),
    *,
    threads: int = 2,
    workers: int = 1,
    ids: str = "uniform",
    tables: int = 1,
    stores: int = 0,
    transport: str = "auto",
    of_workers: Sequence[str] = (),
    batch: int = BATCH,
) -> Job:
    """The click model under Elastable; every worker's batch is a micro-batch, and one of each makes a version.

    Args:
        name: As of `Job`.
        rows: Of all tables together.
        optimizer: Its class in Keras.
        home: As of `Job`.
        options: More of the master, `--store` for one.
        threads: Intra-op threads of a worker.
        workers: How many there are.
        ids: One of `benchmarks.click_job.draws.IDS`.
        tables: One for all features, or one for each.
        stores, transport, of_workers: As of `Job`.
        batch: Examples of a micro-batch.
    """
    job = ["--micro-batch-size", str(batch), "--no-shuffle", "--grads-to-wait", str(workers)]
    job += ["--intra-op-threads", str(threads), *options]
    environment = click_variables(rows, optimizer, ids, tables, batch)
    model = Path(__file__).with_name("model.py")
    return Job(
        name,
        model,
        batch * workers,
        job,
        home,
        environment,
        workers,
        RECORDS // batch + _MORE_STEPS,
        stores=stores,
        transport=transport,
        of_workers=of_workers,
    )


def click_variables(
    rows: int, optimizer: str, ids: str = "uniform", tables: int = 1, batch: int = BATCH
) -> dict[str, str]:
    """The environment of a process that trains the click model."""
    click = {"ROWS": rows, "OPTIMIZER": optimizer, "IDS": ids, "TABLES": tables, "BATCH": batch}
    named = {f"CLICK_{name}": str(value) for name, value in click.items()}
    return {**os.environ, **named, "TF_CPP_MIN_LOG_LEVEL": "3"}


def _launch(
    command: Sequence[str], environment: Mapping[str, str], log: Path, pipes: bool = False
) -> subprocess.Popen[bytes]:
    pipe: int | None = subprocess.PIPE if pipes else subprocess.DEVNULL
    with log.open("wb") as errors:
        output: int | IO[bytes] | None = subprocess.PIPE if pipes else errors
        # Whoever is stopped must not outlive a benchmark that is killed. Not asked for between fork and exec: the
        # benchmark has threads of gRPC, which no forked child survives for sure.
        end_with_parent = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        return subprocess.Popen(
            [*end_with_parent, *command], cwd=_ROOT, env=environment, stdin=pipe, stdout=output, stderr=errors
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


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-8:])
