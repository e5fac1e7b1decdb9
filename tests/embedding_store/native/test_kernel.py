import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PACKAGE = Path(__file__).parents[3] / "embedding_store"
PROGRAM = """
import numpy as np
from elastable.embedding_store.tables.grouping import unique_ids
print(unique_ids(np.array([5, 5, 9]))[0].tolist())
"""


@pytest.mark.parametrize("writable", ["package", "home", "nothing"])
def test_kernels_run_whatever_can_be_written(tmp_path: Path, writable: str) -> None:
    """As in a container: the installed package read-only, and perhaps no home either."""
    package = tmp_path / "elastable" / "embedding_store"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "elastable" / "__init__.py", package.parent)
    blocked = package / "tables" / "__pycache__"
    home = tmp_path / "home"
    home.write_text("a file, so that nothing can be made below it")  # holds for root too, as a mode would not
    if writable != "package":
        blocked.write_text("likewise")
    if writable == "home":
        home.unlink()
        home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-B", "-c", PROGRAM]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "[5, 9]\n"), ran.stderr
    cached = {"package": blocked, "home": home}.get(writable)
    if cached is not None:
        assert list(cached.rglob("grouping._unique-*.nbc"))


COUNTED = f"""
from elastable.embedding_store.support.compile_clock import compile_seconds
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


@pytest.mark.parametrize("shipped", [True, False])
def test_kernels_of_a_cache_that_cannot_be_written_are_read_and_others_compiled(tmp_path: Path, shipped: bool) -> None:
    """As in a container whose root file system is read-only."""
    package, cache = tmp_path / "elastable" / "embedding_store", tmp_path / "cache"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "elastable" / "__init__.py", package.parent)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path)}
    environment["NUMBA_CACHE_DIR"] = str(cache)

    def run(program: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-c", OBEYING_MODES, program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert run(COUNTED) == "[5, 9]\nTrue\n"
    if not shipped:
        for file in cache.rglob("*.nb?"):
            file.unlink()
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert run(COUNTED) == f"[5, 9]\n{not shipped}\n"
    finally:
        for folder in folders:
            folder.chmod(0o755)
