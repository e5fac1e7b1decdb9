import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastable.embedding_store.native import kernel
from elastable.embedding_store.native.kernel import CompileLocks
from elastable.embedding_store.support.clocks import compile_seconds

pytestmark = pytest.mark.process

PACKAGE = Path(__file__).parents[3] / "embedding_store"
PROGRAM = """
import numpy as np
from elastable.embedding_store.tables.grouping import unique_ids
print(unique_ids(np.array([5, 5, 9]))[0].tolist())
"""


def run(home: Path, command: list[str], **environment: str) -> str:
    """What a command prints that finds the package in `home` and little else."""
    paths = {"PATH": os.environ["PATH"], "HOME": str(home / "home"), "PYTHONPATH": str(home), **environment}
    ran = subprocess.run(command, cwd=home, env=paths, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    package = tmp_path / "elastable" / "embedding_store"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "elastable" / "__init__.py", package.parent)
    return package


@pytest.mark.parametrize("writable", ["package", "home"])
def test_kernels_run_whatever_can_be_written(installed: Path, tmp_path: Path, writable: str) -> None:
    """As in a container: the installed package read-only."""
    blocked, home = installed / "tables" / "__pycache__", tmp_path / "home"
    home.write_text("a file, so that nothing can be made below it")  # holds for root too, as a mode would not
    if writable != "package":
        blocked.write_text("likewise")
    if writable == "home":
        home.unlink()
        home.mkdir()
    assert run(tmp_path, [sys.executable, "-B", "-c", PROGRAM]) == "[5, 9]\n"
    cached = {"package": blocked, "home": home}[writable]
    assert list(cached.rglob("grouping._unique-*.nbc"))


COUNTED = f"""
from elastable.embedding_store.support.clocks import compile_seconds
{PROGRAM}
print(compile_seconds() > 0)
"""


# Runs a program for which root obeys the modes of files as others do. Not by `preexec_fn`: in a fork of this process
# gRPC may find its threads gone, and abort.
OBEYING_MODES = """
import ctypes, os, sys
pr_capbset_drop, cap_dac_override = 24, 1
ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-B", "-c", sys.argv[1]])
"""


def test_a_read_only_cache_is_read_and_other_kernels_compiled(installed: Path, tmp_path: Path) -> None:
    cache, command = tmp_path / "cache", [sys.executable, "-c", OBEYING_MODES, COUNTED]

    def ran() -> str:
        return run(tmp_path, command, NUMBA_CACHE_DIR=str(cache))

    assert ran() == "[5, 9]\nTrue\n"
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    try:
        for files, compiled in ((), False), (list(cache.rglob("*.nb?")), True):
            for file in files:
                file.unlink()
            for folder in folders:
                folder.chmod(0o555)
            assert ran() == f"[5, 9]\n{compiled}\n"
    finally:
        for folder in folders:
            folder.chmod(0o755)


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
CHAINED = """
import os, sys
import elastable.embedding_store.native.kernel

def chained():
    from formulas.caller import caller, scaled
    from formulas.chain import between, doubled

    one, two = scaled(between), scaled(doubled)
    values = caller(1.0), one(1.0), two(1.0)
    print(*values, *(sum(kernel.stats.cache_hits.values()) for kernel in (caller, one, two)), flush=True)

for _ in sys.stdin:
    if not (child := os.fork()):
        chained()
        os._exit(0)
    assert not os.waitpid(child, 0)[1]
"""


@pytest.fixture
def chained(package: Path) -> Iterator[Callable[[], list[float]]]:
    """Three results, and of each kernel whether it was loaded rather than compiled, of a new process each time."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(package.parent / "cache")}
    command, pipe = [sys.executable, "-B", "-c", CHAINED], subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, bufsize=1, stdin=pipe, stdout=pipe) as process:

        def output() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("once more\n")
            return [float(word) for word in process.stdout.readline().split()]

        yield output


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


def test_a_kernel_follows_the_sources_of_what_it_calls(package: Path, chained: Callable[[], list[float]]) -> None:
    def files() -> list[str]:
        return sorted(path.name.rsplit(".", 2)[0] for path in package.parent.rglob("*.nbc"))

    assert chained() == [20.0, 2.0, 2.0, 0, 0, 0]
    assert chained() == [20.0, 2.0, 2.0, 1, 1, 1], "unchanged sources were compiled again"

    kept = files()
    (package / "callee.py").write_text(CALLEE.replace("1.0", "2.0"))
    # `doubled` reaches the changed file by nothing but its module, `chain`, so it is loaded.
    assert chained() == [30.0, 3.0, 2.0, 0, 0, 1]
    assert files() == kept, "one for each specialisation, replaced"

    (package / "constants.py").write_text("FACTOR = 100.0\n")
    assert chained() == [300.0, 3.0, 2.0, 0, 1, 1]

    (package / "options.py").write_text(OPTIONS.replace("forceinline=True", "fastmath=True"))
    assert chained() == [300.0, 3.0, 2.0, 0, 0, 1]


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


def test_a_process_that_stops_while_compiling_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
