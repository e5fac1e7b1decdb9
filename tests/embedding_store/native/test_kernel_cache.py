"""Kernels are compiled again when the source of anything that they call changes, and only then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastable.embedding_store.native import kernel
from elastable.embedding_store.native.kernel import CompileLocks
from elastable.embedding_store.support.compile_clock import compile_seconds

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


HELD = """
import sys
from numba.core import event
from formulas.callee import added

class Held(event.Listener):
    def on_start(self, event):
        print("begins", flush=True)
        if "held" in sys.argv:
            sys.stdin.readline()

    def on_end(self, event):
        pass

event.register("numba:compile", Held())
print(added(1.0), sum(added.stats.cache_hits.values()), flush=True)
"""


def test_of_two_processes_at_once_one_compiles_and_the_other_loads_what_it_saved(package: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(package.parent / "cache")}

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-B", "-c", HELD, *words]
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with start("held") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "begins\n"
        with start() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "begins\n"  # to wait for its turn
            output = first.communicate("go on\n", timeout=120)[0].split(), second.communicate(timeout=120)[0].split()
    assert output == (["2.0", "0"], ["2.0", "1"])
    assert not list(package.parent.rglob("*.lock"))


def test_a_process_that_is_stopped_while_it_compiles_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_DEADLINE_S", 0.05)
    lock, stopped, other = tmp_path / "kernel.lock", CompileLocks(), CompileLocks()
    stopped.take(lock)
    before = compile_seconds()
    other.take(lock)
    assert compile_seconds() - before >= 0.05, "deadlines that pause for compilation pause here"
    other.give_back(lock)
    stopped.give_back(lock)
    stopped.give_back(lock)
    other.take(lock)
    other.give_back(lock)
    assert not lock.exists()


def test_where_no_lock_can_be_made_everybody_compiles(tmp_path: Path) -> None:
    locks = CompileLocks()
    locks.take(tmp_path / "absent" / "kernel.lock")
    locks.give_back(tmp_path / "absent" / "kernel.lock")
