"""Whole jobs in real processes, and the trained numbers they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from elastable.local_workers import LocalWorkers
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.client import MasterClient

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


def train(home: Path, workers: int, optimizer: str, store: str = "memory", kill_one: bool = False) -> Numbers:
    """100 versions of 4 micro-batches of 16 records, in one master and `workers` worker processes."""
    environment = {
        **os.environ,
        "EQUALITY_OPTIMIZER": optimizer,
        "EQUALITY_RANDOM": "1",
        "EQUALITY_VOCABULARY": "40",
        "EQUALITY_PAUSE": "0.02" if kill_one else "0",
    }
    command = [sys.executable, "-m", "elastable", "master", str(MODEL), "--listen", "127.0.0.1:0", "--store", store]
    command += ["--micro-batch-size", "16", "--grads-to-wait", "4", "--seed", "11", "--run-dir", str(home)]
    command += ["--checkpoint-dir", str(home / "checkpoints"), "--no-export"]
    with (home / "master.log").open("wb") as log:
        master = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    started: LocalWorkers | None = None
    before = dict(os.environ)
    try:
        address = _address(home, master)
        os.environ.update(environment)
        started = LocalWorkers(workers, address, MODEL, home, deadline_s=60.0)
        if kill_one:
            _kill_in_the_middle(address, started.pids[0])
        code = master.wait(timeout=240)
        assert code == 0, (home / "master.log").read_text()
    finally:
        os.environ.clear()
        os.environ.update(before)
        if started is not None:
            started.stop(wait_s=10.0)
        if master.poll() is None:
            master.kill()
            master.wait(timeout=10)
    return trained_numbers(home / "checkpoints")


def _address(home: Path, master: subprocess.Popen[bytes]) -> str:
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
            assert status.version < 80, "too late to kill anybody"
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)
    raise AssertionError("the worker never counted")


def differing(ours: Numbers, theirs: Numbers) -> list[str]:
    """The names of all numbers that are not equal to the bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
