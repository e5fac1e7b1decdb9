"""Runs every benchmark, or those named: `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

__all__ = ["main"]

_BENCHES = (
    "store",
    "lookup",
    "dynamic",
    "update",
    "catch_up",
    "dtypes",
    "partitions",
    "host_embeddings",
    "kg_balance",
    "kg",
    "kg_bounds",
    "kg_beyond_memory",
    "sharded_training",
    "wire",
    "load",
    "sessions",
    "offload",
    "scale",
    "simulation",
    "redis_rows",
    "redis_log",
    "commit_log",
    "redis_appends",
    "recovery",
    "tiers",
    "cold_rows",
    "pins",
    "checkpoints",
    "peers",
    "click",
    "stores",
    "pressure",
    "promises",
    "metrics",
    "evaluations",
    "collectives",
)


def main(names: list[str]) -> int:
    """The number of benchmarks that failed; each runs in a process of its own."""
    unknown = [name for name in names if name not in _BENCHES]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(_BENCHES)}", file=sys.stderr)
        return 2
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    failed = 0
    for name in names or _BENCHES:
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], env=quiet, check=False).returncode
        failed += code != 0
        print(f"{name}: {time.monotonic() - began:.0f} s{'' if code == 0 else f', failed with exit code {code}'}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
