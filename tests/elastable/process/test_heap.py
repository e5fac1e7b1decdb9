"""Memory that a step has freed is there for the next one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Pages that are mapped anew by 50 rounds of taking and freeing 8 MiB, which are 2,048 pages.
COUNTING = """
import resource
import numpy as np
from elastable.process.heap import keep_freed_memory
{prepare}
def step():
    a = np.ones(1 << 20, np.float32); b = np.ones(1 << 20, np.float32); del a, b
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(prepare: str, **environment: str) -> int:
    told = subprocess.run(
        [sys.executable, "-c", COUNTING.format(prepare=prepare)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(told.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps or gives back as it likes")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    assert faults("keep_freed_memory()") < 1_000
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    assert faults("keep_freed_memory()", **small) > 50_000
