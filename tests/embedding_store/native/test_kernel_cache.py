"""Kernels are compiled again when the source of anything that they call changes, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

CALLER = """
from elastable.embedding_store.native.kernel import kernel
from formulas.chain import between
from formulas.constants import FACTOR


@kernel
def caller(value):
    return between(value) * FACTOR


def scaled(step):
    @kernel
    def run(value):
        return step(value)

    return run
"""
CHAIN = """
from elastable.embedding_store.native.kernel import kernel
from formulas.callee import added
from formulas.options import inlined


@inlined
def between(value):
    return added(value)


@kernel
def doubled(value):
    return 2.0 * value
"""
CALLEE = """
from elastable.embedding_store.native.kernel import kernel


@kernel
def added(value):
    return value + 1.0
"""
OPTIONS = """
import numba

inlined = numba.njit(forceinline=True, error_model="numpy")
"""
PROGRAM = """
from formulas.caller import caller, scaled
from formulas.chain import between, doubled

one, two = scaled(between), scaled(doubled)
values = caller(1.0), one(1.0), two(1.0)
print(*values, *(sum(kernel.stats.cache_hits.values()) for kernel in (caller, one, two)))
"""


def run(folder: Path) -> list[float]:
    """Three results, and of each kernel whether it was loaded rather than compiled."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-B", "-c", PROGRAM]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return [float(word) for word in ran.stdout.split()]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "formulas"
    folder.mkdir()
    sources = {
        "__init__": "",
        "constants": "FACTOR = 10.0\n",
        "callee": CALLEE,
        "chain": CHAIN,
        "caller": CALLER,
        "options": OPTIONS,
    }
    for name, text in sources.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_kernel_follows_the_sources_of_what_it_calls(package: Path) -> None:
    assert run(package.parent) == [20.0, 2.0, 2.0, 0, 0, 0]
    assert run(package.parent) == [20.0, 2.0, 2.0, 1, 1, 1], "unchanged sources were compiled again"

    (package / "callee.py").write_text(CALLEE.replace("1.0", "2.0"))
    # `doubled` reaches the changed file by nothing but its module, `chain`, so it is loaded.
    assert run(package.parent) == [30.0, 3.0, 2.0, 0, 0, 1]

    (package / "constants.py").write_text("FACTOR = 100.0\n")
    assert run(package.parent) == [300.0, 3.0, 2.0, 0, 1, 1]

    (package / "options.py").write_text(OPTIONS.replace("forceinline=True", "fastmath=True"))
    assert run(package.parent) == [300.0, 3.0, 2.0, 0, 0, 1]


def test_a_file_is_kept_for_each_specialisation_and_replaced_when_sources_change(package: Path) -> None:
    run(package.parent)
    kept = {path.name.rsplit(".", 2)[0] for path in package.parent.rglob("*.nbc")}
    (package / "callee.py").write_text(CALLEE.replace("1.0", "2.0"))
    run(package.parent)
    names = [path.name.rsplit(".", 2)[0] for path in package.parent.rglob("*.nbc")]
    assert sorted(names) == sorted(kept)
