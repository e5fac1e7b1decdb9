"""What replicas do in `test_replicas`: `replica_program.py WHAT HOME`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import elastable as et
from elastable.embedding_store.errors import BadInput


def main(what: str, home: Path) -> None:
    """Adds the ranks up; then rank 1 ends in some way, or all wait."""
    group = et.replica_group()
    (home / f"{group.rank}.pid").write_text(str(os.getpid()))
    total = group.all_reduce(np.float64(group.rank + 1))  # type: ignore[arg-type, var-annotated]
    print(f"{group.size} replicas add up to {total}")
    if what == "child" and group.rank == 1:
        command = [sys.executable, __file__, "add", str(home)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        print(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment).stdout)
    if what == "fail" and group.rank == 1:
        raise BadInput("no such entity")
    if what == "exit" and group.rank == 1:
        sys.exit(42)
    if what == "fail":
        group.barrier()
    if what == "wait":
        (home / f"{group.rank}.waits").touch()
        time.sleep(100)
    if what == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        group.barrier()
        (home / f"{group.rank}.waits").touch()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(100)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
