"""The cost of versions to a running job: pins held while it trains, and checkpoints written meanwhile.

The job is that of `benchmarks/jobs/click.py`: a master and a worker in separate
processes, 26 ids of one table per example, Adagrad. A new pin is taken twice a
second, so that nearly every changed row is preserved. For checkpoints,
examples/s while one is being written are compared with examples/s otherwise.

    python -m benchmarks.storage.promises
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.click_job.contender import ready
from benchmarks.click_job.contenders import click_job
from benchmarks.click_job.sizes import BATCH
from benchmarks.harness import Row, compare, interleaved, publish
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore

_ROWS, _OPTIMIZER, _THREADS = 1_000_000, "Adagrad", 2
_ROUNDS, _SECONDS = 7, 2.0
_PIN_EVERY_S = 0.5
_SAVE_EVERY = 400  # versions
_LOOK_EVERY_S = 0.05
_LOOKS = 600
_STEP_FLOOR = 1 / 1.15  # pins cost at most 15 % of a step
_SAVING_FLOOR = 0.8  # training slows by less than 20 % while a checkpoint is written


def main() -> None:
    """Measures, prints and writes `results/promises.json`."""
    with tempfile.TemporaryDirectory(prefix="promises-") as home:
        rows = [_pinned(Path(home) / "pinned"), _saving(Path(home) / "saving")]
    publish("promises", "The cost of versions to a running job: the click model, Adagrad, 1 M rows", rows)


def _pinned(home: Path) -> Row:
    home.mkdir()
    with ready(click_job("pinned", _ROWS, _OPTIMIZER, home, threads=_THREADS)) as (job,):

        def with_pins(seconds: float) -> float:
            with job.running(), _pinning(job.address):
                return job.measured(seconds)

        turns = {"pinned": partial(with_pins, _SECONDS), "plain": partial(job.examples_per_second, _SECONDS)}
        rounds = interleaved(turns, _ROUNDS)
    name = "training with a fresh pin every half second, vs. without"
    return compare(name, "examples/s", rounds["pinned"], rounds["plain"], _STEP_FLOOR)


@contextmanager
def _pinning(address: str) -> Iterator[None]:
    """Repeatedly pins the current version, from a separate process."""
    over = threading.Event()

    def pin() -> None:
        with RemoteStore(address) as store:
            while not over.is_set():
                with store.pin(lease_s=30.0):
                    over.wait(_PIN_EVERY_S)

    pinning = threading.Thread(target=pin)
    pinning.start()
    try:
        yield
    finally:
        over.set()
        pinning.join()


def _saving(home: Path) -> Row:
    """Examples/s of short stretches in which a checkpoint was being written from end to end, and of those without."""
    checkpoints = home / "checkpoints"
    checkpoints.mkdir(parents=True)
    more = ("--checkpoint-dir", str(checkpoints), "--checkpoint-every", str(_SAVE_EVERY), "--keep", "2")
    stretches: dict[bool, list[float]] = {True: [], False: []}
    with ready(click_job("saving", _ROWS, _OPTIMIZER, home, more, threads=_THREADS)) as (job,), job.running():
        version, began, before = job.version(), time.perf_counter(), _drafts(checkpoints)
        for _ in range(_LOOKS):
            time.sleep(_LOOK_EVERY_S)
            now, ended, drafts = job.version(), time.perf_counter(), _drafts(checkpoints)
            if drafts == before:
                stretches[bool(drafts)].append((now - version) * BATCH / (ended - began))
            version, began, before = now, ended, drafts
    means = {saving: statistics.fmean(figures) for saving, figures in stretches.items()}
    ratio = means[True] / means[False]
    name = f"training while a checkpoint of {_ROWS:,} rows is written, vs. while none is"
    return Row(name, means[True], "examples/s", means[False], ratio, _SAVING_FLOOR)


def _drafts(checkpoints: Path) -> set[str]:
    return {entry.name for entry in checkpoints.glob(".writing-*")}


if __name__ == "__main__":
    main()
