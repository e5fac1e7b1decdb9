"""The image brings every kernel that a job runs: what its build compiles, and what a job with a store server adds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastable.processes import elastable
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
BUILD = """
import runpy, sys
names = runpy.run_path(sys.argv[1])
names["main"].__globals__["PORT"] = int(sys.argv[2])
names["main"]()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_compiles_no_kernel_that_the_image_does_not_bring(tmp_path: Path, redis_url: str) -> None:
    cache = tmp_path / "kernels"
    where = {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    build: list[str | Path] = [sys.executable, "-c", BUILD, ROOT / "deploy/compile-kernels.py", str(free_port())]
    subprocess.run(build, env={**os.environ, **where}, check=True, timeout=900)
    brought = set(cache.rglob("*.nbc"))
    assert len(brought) > 100
    words = ("train", ROOT / "examples/flights/model.py", "--workers", "2", "--stores", "1", "--store", redis_url)
    job = ("--micro-batch-size", "256", "--grads-to-wait", "2", "--no-export", "--run-dir", tmp_path / "runs")
    with elastable(tmp_path, *words, *job, env=where, new=True) as process:
        assert process.wait(900) == 0, process.err
    assert not [file.name for file in cache.rglob("*.nbc") if file not in brought]
