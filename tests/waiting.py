"""Waiting for what another thread or process does."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Returns once the condition is true; fails where it is not within `limit_s`, which is for broken code alone."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not so within {limit_s} s"
        time.sleep(0.01)


def until_stopped(process: subprocess.Popen[str] | subprocess.Popen[bytes], limit_s: float = 120.0) -> None:
    """Returns once the process, with all of its threads, has stopped itself, or was stopped by a signal."""

    def stopped() -> bool:
        threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
        return {thread.read_text().rpartition(")")[2].split()[0] for thread in threads} == {"T"}

    until(lambda: process.poll() is not None or stopped(), limit_s)
    assert process.returncode is None, process.communicate(timeout=limit_s)
