"""Numbers of plain Keras on the same backend, in one process that has no other framework."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.backends.on_backend import ROOT, OnBackend
from tests.elastable.processes import LIMIT_S

pytestmark = pytest.mark.process

CHECKS = re.findall(r"^def (check_\w+)", Path(__file__).with_name("program.py").read_text(), re.MULTILINE)
_Said = dict[str, tuple[object, str]]


@pytest.fixture(scope="module")
def said(backend: OnBackend) -> _Said:
    """Of every check what it returned, and how it failed."""
    ran = subprocess.run(
        [backend.python, "-m", "tests.backends.program"],
        env=backend.environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return {name: (returned, failed) for name, returned, failed in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("check", CHECKS)
def test_in_one_process(said: _Said, check: str) -> None:
    _, failed = said[check]
    assert not failed, failed


def test_no_other_framework_is_imported(said: _Said) -> None:
    assert said["imported"] == ([], "")
