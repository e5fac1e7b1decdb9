"""Runs every benchmark, or those named: `python -m benchmarks [NAME ...]`."""

import os
import subprocess
import sys
import time

_BENCHES = {
    "store": "benchmarks.tables.store",
    "lookup": "benchmarks.tables.lookup",
    "dynamic": "benchmarks.tables.dynamic",
    "update": "benchmarks.tables.update",
    "catch_up": "benchmarks.tables.catch_up",
    "dtypes": "benchmarks.tables.dtypes",
    "partitions": "benchmarks.tables.partitions",
    "host_embeddings": "benchmarks.replicas.host_embeddings",
    "kg_balance": "benchmarks.graphs.kg_balance",
    "kg": "benchmarks.graphs.kg",
    "kg_bounds": "benchmarks.graphs.kg_bounds",
    "kg_beyond_memory": "benchmarks.graphs.kg_beyond_memory",
    "sharded_training": "benchmarks.replicas.sharded_training",
    "wire": "benchmarks.calls.wire",
    "load": "benchmarks.calls.load",
    "sessions": "benchmarks.calls.sessions",
    "waiting": "benchmarks.calls.waiting",
    "offload": "benchmarks.jobs.offload",
    "scale": "benchmarks.scale",
    "simulation": "benchmarks.simulation",
    "redis_rows": "benchmarks.storage.redis_rows",
    "redis_log": "benchmarks.storage.redis_log",
    "commit_log": "benchmarks.storage.commit_log",
    "redis_appends": "benchmarks.storage.redis_appends",
    "recovery": "benchmarks.storage.recovery",
    "tiers": "benchmarks.storage.tiers",
    "cold_rows": "benchmarks.storage.cold_rows",
    "pins": "benchmarks.storage.pins",
    "checkpoints": "benchmarks.storage.checkpoints",
    "peers": "benchmarks.peers",
    "click": "benchmarks.jobs.click",
    "stores": "benchmarks.jobs.stores",
    "pressure": "benchmarks.storage.pressure",
    "promises": "benchmarks.storage.promises",
    "metrics": "benchmarks.jobs.metrics",
    "evaluations": "benchmarks.jobs.evaluations",
    "collectives": "benchmarks.replicas.collectives",
}
"""Name -> module, in the order in which they run."""


def main(names: list[str]) -> int:
    """The number of benchmarks that failed; each runs in a separate process."""
    unknown = [name for name in names if name not in _BENCHES]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(_BENCHES)}", file=sys.stderr)
        return 2
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    failed = 0
    for name in names or _BENCHES:
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", _BENCHES[name]], env=quiet, check=False).returncode
        failed += code != 0
        print(f"{name}: {time.monotonic() - began:.0f} s{'' if code == 0 else f', failed with exit code {code}'}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
