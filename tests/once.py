"""What several processes of one run of the tests need, made by the first of them."""

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

_T = TypeVar("_T")


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], _T]) -> _T:
    """What `make` returns for a new folder, called in one process of the run alone; the others wait for it."""
    base = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # which all workers of the run share
    made = base / f"{name}.pickle"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_bytes(pickle.dumps(make(folders.mktemp(name))))
    found: _T = pickle.loads(made.read_bytes())
    return found
