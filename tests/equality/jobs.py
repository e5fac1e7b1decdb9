"""Whole jobs in real processes, and the trained numbers they leave."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.rpc.client import MasterClient
from tests.elastable.processes import Running as RunningProcess
from tests.elastable.processes import elastable
from tests.preloaded.client import HERE, Interpreter
from tests.waiting import until

MODEL = Path(__file__).parent / "model.py"
Numbers = dict[str, np.ndarray]
_JOB_S = 400.0


def trained_numbers(checkpoint: Path) -> Numbers:
    """Every row, slot, dense variable, state and optimizer variable of a checkpoint, by name."""
    saved = open_checkpoint(checkpoint)
    numbers = dict(saved.dense())
    for table in saved.manifest.tables:
        numbers |= table_numbers(table, saved.rows(table))
    return numbers


def table_numbers(table: str, blocks: Iterable[RowBlock]) -> Numbers:
    """Ids, weights and slots of a table, sorted by id."""
    parts = [(block.ids, block.weights, block.slots) for block in blocks]
    ids, weights, slots = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(ids)
    return {f"{table}/ids": ids[order], f"{table}/weights": weights[order], f"{table}/slots": slots[order]}


def train(
    home: Path,
    workers: int,
    optimizer: str,
    store: str = "memory",
    midway: Callable[[], object] | None = None,
    stores: Sequence[str] = (),
    during: "Callable[[Running], None] | None" = None,
    options: Sequence[str] = (),
    random: bool = True,
    of: Interpreter = HERE,
) -> Numbers:
    """50 versions of 4 micro-batches of 16 records, in one master and `workers` worker processes.

    Args:
        midway: Called after the second version; the job does not end before it returns.
        stores: Addresses of store servers, in the place of `store`.
        during: Called while the job runs: it may kill and start processes.
        options: Further words of the master's command.
        random: Whether the model has BatchNormalization and Dropout, and a loss of several terms.
        of: The Python of master and workers.
    """
    home.mkdir(exist_ok=True)
    environment = {
        "EQUALITY_OPTIMIZER": optimizer,
        "EQUALITY_RANDOM": "1" if random else "0",
        "EQUALITY_VOCABULARY": "40",
        "EQUALITY_PAUSE": "0.02" if during else "0",
        "EQUALITY_GATE": "" if midway is None else str(home / "gate"),
    }
    command = ["master", str(MODEL), "--listen", "127.0.0.1:0"]
    command += [] if stores else ["--store", store]
    command += ["--micro-batch-size", "16", "--seed", "11", "--run-dir", str(home)]
    command += ["--checkpoint-dir", str(home / "checkpoints"), "--no-export"]
    command += ["--grads-to-wait", "4", *options, *(["--stores", ",".join(stores)] if stores else [])]
    with ExitStack() as held:
        job = Running(home, command, environment, held, of)
        job.start_master()
        for _ in range(workers):
            job.start_worker()
        if midway is not None:
            with MasterClient(job.address, deadline_s=30) as client:
                until(lambda: client.status().version >= 2, 120)
            midway()
            (home / "gate").touch()
        if during is not None:
            during(job)
        assert job.processes[0].wait(_JOB_S) == 0, job.processes[0].err
        assert [worker.wait(60) for worker in job.processes[1:]] == [0] * workers
    return trained_numbers(home / "checkpoints")


@dataclass
class Running:
    home: Path  # directory for everything
    command: list[str]  # of the master
    environment: dict[str, str]  # of all processes, besides this one's
    held: ExitStack  # ends them
    of: Interpreter = HERE  # their Python
    processes: list[RunningProcess] = field(default_factory=list)  # the master, then the workers
    address: str = ""  # of the master

    def start_master(self, *more: str) -> None:
        """Starts the master, in the place of one that has ended; `more`: further words of its command."""
        self.processes[:1] = [self._started("master", *self.command, *more)]
        self.address = self.address or self.processes[0].address()

    def start_worker(self) -> None:
        words = ("worker", MODEL, "--master", self.address, "--deadline", "60")
        self.processes.append(self._started(f"worker-{len(self.processes) - 1}", *words))

    def _started(self, name: str, *words: str | Path) -> RunningProcess:
        return self.held.enter_context(elastable(self.home, *words, env=self.environment, name=name, of=self.of))

    def until_version(self, version: int) -> None:
        """Waits until the job has reached a version, and asserts that it is not near its end."""
        with MasterClient(self.address, deadline_s=60) as client:
            give_up = time.monotonic() + 120
            while (reached := client.status().version) < version:
                assert time.monotonic() < give_up, f"version {reached} is the last after two minutes"
                time.sleep(0.02)
            assert reached < 45, "too late for what is to happen"


def differing(ours: Numbers, theirs: Numbers) -> list[str]:
    """The names of all numbers that are not equal to the bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
