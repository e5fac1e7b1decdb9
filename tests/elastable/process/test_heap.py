"""Memory that a step has freed is there for the next one, and garbage is not looked for in what is imported."""

import gc
import os
import platform
import subprocess
import sys

import pytest

from elastable.process.heap import keep_collections_short, without_collections

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
    output = subprocess.run(
        [sys.executable, "-c", COUNTING.format(prepare=prepare)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(output.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps or gives back as it likes")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    assert faults("keep_freed_memory()") < 1_000
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    assert faults("keep_freed_memory()", **small) > 50_000


@pytest.mark.parametrize("collecting", [True, False])
def test_what_is_imported_is_left_out_of_collections_and_these_go_on_as_before(collecting: bool) -> None:
    if not collecting:
        gc.disable()
    try:
        with without_collections():
            assert not gc.isenabled()
            made: list[list[int]] = [[] for _ in range(1_000)]
        assert gc.isenabled() is collecting
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.enable()


def test_collections_of_a_server_are_seldom_and_leave_out_what_it_has_loaded() -> None:
    before = gc.get_threshold()
    loaded: list[list[int]] = [[]]
    try:
        keep_collections_short()
        assert gc.get_threshold() == (10_000, *before[1:])
        assert not any(each is loaded for each in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
