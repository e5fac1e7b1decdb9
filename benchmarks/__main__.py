"""Runs every benchmark, or those named: `python -m benchmarks [NAME ...]`."""

import os
import subprocess
import sys
import time

_ROOMS = {
    "tables": "lookup dynamic update catch_up dtypes partitions",
    "graphs": "kg_balance kg kg_bounds kg_beyond_memory",
    "replicas": "host_embeddings sharded_training",
    "calls": "wire load sessions waiting predictions",
    "storage": "redis_rows redis_log recovery tiers cold_rows pins checkpoints pressure promises",
    "jobs": "offload click backends stores metrics evaluations events stream_to_prediction",
}
"""Room -> its benchmarks, in the order in which they run."""

_BENCHES = {name: f"benchmarks.{room}.{name}" for room, names in _ROOMS.items() for name in names.split()}
_BENCHES |= {name: f"benchmarks.{name}" for name in ("scale", "simulation", "peers")}


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
