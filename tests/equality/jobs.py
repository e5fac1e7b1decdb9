"""Whole jobs in real processes, and the trained numbers they leave."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.wire.client import MasterClient
from tests.preloaded.client import PreloadedProcess
from tests.waiting import until

MODEL = Path(__file__).parent / "model.py"
Numbers = dict[str, np.ndarray]


def trained_numbers(checkpoint: Path) -> Numbers:
    """Every row, slot, dense variable, state and optimizer variable of a checkpoint, by name."""
    saved = open_checkpoint(checkpoint)
    numbers = dict(saved.dense())
    for table in saved.manifest.tables:
        blocks = list(saved.rows(table))
        ids = np.concatenate([block.ids for block in blocks])
        order = np.argsort(ids)
        numbers[f"{table}/ids"] = ids[order]
        numbers[f"{table}/weights"] = np.concatenate([block.weights for block in blocks])[order]
        numbers[f"{table}/slots"] = np.concatenate([block.slots for block in blocks])[order]
    return numbers


def train(
    home: Path,
    workers: int,
    optimizer: str,
    store: str = "memory",
    kill_one: bool = False,
    midway: Callable[[], object] | None = None,
) -> Numbers:
    """50 versions of 4 micro-batches of 16 records, in one master and `workers` worker processes.

    `midway`: is called after the second version; the job does not end before it returns.
    """
    environment = {
        **os.environ,
        "EQUALITY_OPTIMIZER": optimizer,
        "EQUALITY_RANDOM": "1",
        "EQUALITY_VOCABULARY": "40",
        "EQUALITY_PAUSE": "0.02" if kill_one else "0",
        "EQUALITY_GATE": "" if midway is None else str(home / "gate"),
    }
    command = ["-m", "elastable", "master", str(MODEL), "--listen", "127.0.0.1:0", "--store", store]
    command += ["--micro-batch-size", "16", "--grads-to-wait", "4", "--seed", "11", "--run-dir", str(home)]
    command += ["--checkpoint-dir", str(home / "checkpoints"), "--no-export"]
    started = [_started(home / "master.log", command, environment)]
    try:
        address = _address(home, started[0])
        working = ["-m", "elastable", "worker", str(MODEL), "--master", address, "--deadline", "60"]
        started += [_started(home / f"worker-{number}.log", working, environment) for number in range(workers)]
        if kill_one:
            _kill_in_the_middle(address, started[1].pid)
        if midway is not None:
            with MasterClient(address, deadline_s=30) as client:
                until(lambda: client.status().version >= 2, 120)
            midway()
            (home / "gate").touch()
        code = started[0].wait(timeout=240)
        assert code == 0, (home / "master.log").read_text()
        codes = [worker.wait(timeout=60) for worker in started[1:]]
        assert codes == [-signal.SIGKILL if kill_one and number == 0 else 0 for number in range(workers)]
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=60)
    return trained_numbers(home / "checkpoints")


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


def _kill_in_the_middle(address: str, pid: int) -> None:
    """SIGKILL once the worker has counted micro-batches and the job is not near its end."""
    client = MasterClient(address, deadline_s=30)
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        status = client.status()
        counted = [worker.micro_batches for worker in status.workers if worker.identity.pid == pid]
        if counted and counted[0] >= 5:
            assert status.version < 40, "too late to kill anybody"
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)
    raise AssertionError("the worker never counted")


def differing(ours: Numbers, theirs: Numbers) -> list[str]:
    """The names of all numbers that are not equal to the bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
