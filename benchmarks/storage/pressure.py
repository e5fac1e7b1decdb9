"""Back-pressure: five minutes of training in which every row is cold, and what is not flushed stays bounded.

The click model with one table of five million rows, every row of it once before any comes again, under Adagrad with
tables in Redis. The flush is slower than the commits, so commits wait for it: examples/s of every half minute, and the
bytes in the log. The pace is steady when no half minute after the first falls below the floor's share of their median.

    python -m benchmarks.storage.pressure [MINUTES] [STORE]

STORE is a URL in which `{redis}` is the address of a server that is started.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.click_job.contender import ready
from benchmarks.click_job.contenders import click_job
from benchmarks.click_job.sizes import BATCH
from benchmarks.harness import Row, publish
from benchmarks.processes import redis_server
from benchmarks.storage.redis_log import COMPOSE_REDIS
from tests.servers import Server

_MINUTES = 5.0
_STEP_S = 30.0
_STORE = "redis://{redis}?deadline=120"
_ROWS, _OPTIMIZER = 5_000_000, "Adagrad"
_STEADY = 0.8
_MB = 1e6


def main(minutes: float = _MINUTES, store: str = _STORE) -> None:
    """Measures, prints and writes `results/pressure.json`."""
    paces: list[float] = []
    logs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="pressure-") as folder, redis_server(*COMPOSE_REDIS) as server:
        options = ["--store", store.replace("{redis}", server.address)]
        job_of_cold_rows = click_job("cold", _ROWS, _OPTIMIZER, Path(folder), options, ids="cold")
        with ready(job_of_cold_rows) as (job,), job.running():
            for number in range(round(60 * minutes / _STEP_S)):
                version, began = job.version(), time.perf_counter()
                time.sleep(_STEP_S)
                paces.append((job.version() - version) * BATCH / (time.perf_counter() - began))
                logs.append(_log_bytes(server) / _MB)
                said = f"{(number + 1) * _STEP_S:4.0f} s: {paces[-1]:,.0f} examples/s, log {logs[-1]:,.1f} MB"
                print(said, flush=True)
    later = paces[1:] or paces
    middle = statistics.median(later)
    rows = [
        Row(
            "slowest half minute, against their median", min(later), "examples/s", middle, min(later) / middle, _STEADY
        ),
        Row("last half minute, against their median", later[-1], "examples/s", middle, later[-1] / middle, _STEADY),
        Row("largest log, of those looked at each half minute", max(logs), "MB"),
    ]
    publish("pressure", f"{minutes:g} minutes, every row cold, {_OPTIMIZER}, tables in Redis", rows)


def _log_bytes(server: Server) -> float:
    """Memory of all streams at the server."""
    with server.client() as client:
        return float(sum(client.memory_usage(key) or 0 for key in client.scan_iter(_type="STREAM", count=10_000)))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else _MINUTES, *sys.argv[2:3])
