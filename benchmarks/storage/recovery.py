"""How long a store takes to open again after its process was killed with a million changed rows in the log.

A process commits rows of 16 values under Adagrad, 20,000 a version, each row once, with records of 64 KiB, and kills
itself after the last commit. The time is that of opening the store again, up to the first lookup at its last version.
What is flushed before the kill is not in the log any more, so the store decides how much is replayed.

    python -m benchmarks.storage.recovery [URL ...]

`{home}` in a URL is a new folder, `{redis}` the address of a new server.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, publish
from benchmarks.processes import redis_server
from benchmarks.storage.redis_log import COMPOSE_REDIS
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.open_store import open_store
from elastable.process.heap import keep_freed_memory

_CHANGED, _A_COMMIT, _DIM = 1_000_000, 20_000, 16
_RECORD = bytes(1 << 16)
_ROUNDS = 3
_AT_MOST_S = {"memory?log={home}&log_bytes=8GiB": 3.0, "redis://{redis}?deadline=120": 10.0}
_FILL = "--fill"


def main(urls: Sequence[str]) -> None:
    """Measures, prints and writes `results/recovery.json`."""
    rows = []
    for url in urls or _AT_MOST_S:
        seconds = [_recovered(url) for _ in range(_ROUNDS)]
        print(url, " ".join(f"{one:.2f}" for one in seconds), flush=True)
        middle, most = statistics.median(seconds), _AT_MOST_S.get(url)
        name = f"recovery, a million changed rows of {_DIM} values: {url.partition('?')[0].partition(':')[0]}"
        rows.append(Row.at_most(f"{name}, against {most:g} s", middle, "s", most) if most else Row(name, middle, "s"))
    publish("recovery", "Opening a store again whose process was killed", rows)


def _recovered(url: str) -> float:
    """Seconds until a store whose writer was killed answers a lookup at its last version."""
    with ExitStack() as held:
        home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="recovery-")))
        place = url.replace("{home}", str(home / "store"))
        if "{redis}" in url:
            place = place.replace("{redis}", held.enter_context(redis_server(*COMPOSE_REDIS)).address)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.storage.recovery", _FILL, place], check=False
        ).returncode
        if done != -signal.SIGKILL:
            raise SystemExit(f"the writer of {place} ended with exit code {done}")
        began = time.perf_counter()
        with open_store(place) as store:
            version = store.version()
            looked = store.lookup({"t": np.arange(_CHANGED - _A_COMMIT, _CHANGED)}, version)["t"]
            seconds = time.perf_counter() - began
            if version != _CHANGED // _A_COMMIT or not np.ptp(looked, axis=0).any():
                raise SystemExit(f"{place} came back at version {version}")
    return seconds


def _fill(url: str) -> None:
    """Commits, and dies after the last commit."""
    keep_freed_memory()  # as every process of the `elastable` command does
    gradients = np.random.default_rng(1).standard_normal((_A_COMMIT, _DIM), dtype=np.float32)
    store = open_store(url)
    store.create_table(TableSpec("t", _DIM, None, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.01)))
    for version in range(1, _CHANGED // _A_COMMIT + 1):
        ids = np.arange((version - 1) * _A_COMMIT, version * _A_COMMIT)
        store.commit(Commit(version, {"t": TableUpdate(ids, gradients)}, version - 1, {}, _RECORD))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:2] == [_FILL]:
        _fill(sys.argv[2])
    else:
        keep_freed_memory()
        main(sys.argv[1:])
