"""Whole jobs in real processes, and the trained numbers they leave."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.rpc.client import MasterClient
from tests.preloaded.client import PreloadedProcess
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
) -> Numbers:
    """50 versions of 4 micro-batches of 16 records, in one master and `workers` worker processes.

    Args:
        midway: Called after the second version; the job does not end before it returns.
        stores: Addresses of store servers, in the place of `store`.
        during: Called while the job runs: it may kill and start processes.
        options: Further words of the master's command.
    """
    home.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "EQUALITY_OPTIMIZER": optimizer,
        "EQUALITY_RANDOM": "1",
        "EQUALITY_VOCABULARY": "40",
        "EQUALITY_PAUSE": "0.02" if during else "0",
        "EQUALITY_GATE": "" if midway is None else str(home / "gate"),
    }
    command = ["-m", "elastable", "master", str(MODEL), "--listen", "127.0.0.1:0"]
    command += [] if stores else ["--store", store]
    command += ["--micro-batch-size", "16", "--seed", "11", "--run-dir", str(home)]
    command += ["--checkpoint-dir", str(home / "checkpoints"), "--no-export"]
    command += ["--grads-to-wait", "4", *options, *(["--stores", ",".join(stores)] if stores else [])]
    running = Running(home, command, environment)
    try:
        running.start_master()
        for _ in range(workers):
            running.start_worker()
        if midway is not None:
            with MasterClient(running.address, deadline_s=30) as client:
                until(lambda: client.status().version >= 2, 120)
            midway()
            (home / "gate").touch()
        if during is not None:
            during(running)
        code = running.ended()
        assert code == 0, (home / "master.log").read_text()
        codes = [worker.wait(timeout=60) for worker in running.processes[1:]]
        assert codes == [0] * workers
    finally:
        for process in running.processes:
            process.kill()
            process.wait(timeout=60)
    return trained_numbers(home / "checkpoints")


@dataclass
class Running:
    home: Path  # directory for everything
    command: list[str]  # of the master
    environment: dict[str, str]  # of all processes
    processes: list[PreloadedProcess] = field(default_factory=list)  # the master, then the workers
    address: str = ""  # of the master

    def start_master(self, *more: str) -> None:
        """Starts the master, in the place of one that has ended; `more`: further words of its command."""
        log = self.home / "master.log"
        self.processes[:1] = [_started(log, [*self.command, *more], self.environment)]
        if not self.address:
            self.address = _address(self.home, self.processes[0])

    def start_worker(self) -> None:
        words = ["-m", "elastable", "worker", str(MODEL), "--master", self.address, "--deadline", "60"]
        log = self.home / f"worker-{len(self.processes) - 1}.log"
        self.processes.append(_started(log, words, self.environment))

    def ended(self) -> int:
        """The master's exit code, once it has one; fails with all logs where it has none for too long."""
        try:
            return self.processes[0].wait(timeout=_JOB_S)
        except subprocess.TimeoutExpired:
            logs = "".join(f"\n== {log.name}\n{log.read_text()[-4000:]}" for log in sorted(self.home.glob("*.log")))
            raise AssertionError(f"the job has not ended within {_JOB_S} s{logs}") from None

    def until_version(self, version: int) -> None:
        """Waits until the job has reached a version, and asserts that it is not near its end."""
        with MasterClient(self.address, deadline_s=60) as client:
            give_up = time.monotonic() + 120
            while (reached := client.status().version) < version:
                assert time.monotonic() < give_up, f"version {reached} is the last after two minutes"
                time.sleep(0.02)
            assert reached < 45, "too late for what is to happen"


def _started(log: Path, words: list[str], environment: dict[str, str]) -> PreloadedProcess:
    with log.open("wb") as output:
        return PreloadedProcess(words, output, output, MODEL.parents[2], environment)


def _address(home: Path, master: PreloadedProcess) -> str:
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up and master.poll() is None:
        for file in home.glob("latest/job.json"):
            if text := file.read_text():
                return str(json.loads(text)["address"])
        time.sleep(0.1)
    raise AssertionError(f"the master did not start:\n{(home / 'master.log').read_text()}")


def differing(ours: Numbers, theirs: Numbers) -> list[str]:
    """The names of all numbers that are not equal to the bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
