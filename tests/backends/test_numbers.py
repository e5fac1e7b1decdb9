"""Numbers of plain Keras on the same backend, in one process that has no other framework."""

import json
import re
from pathlib import Path

import pytest

from tests.backends.on_backend import ROOT
from tests.preloaded.client import Interpreter, run_preloaded

pytestmark = pytest.mark.process

CHECKS = re.findall(r"^def (check_\w+)", Path(__file__).with_name("program.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def said(backend: Interpreter) -> dict[str, object]:
    """Of every check how it failed, "" of those that did not; and which other frameworks were imported."""
    ran = run_preloaded(["-m", "tests.backends.program"], ROOT, of=backend)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return dict(map(json.loads, ran.stdout.splitlines()))


@pytest.mark.parametrize("check", CHECKS)
def test_in_one_process(said: dict[str, object], check: str) -> None:
    assert not said[check], said[check]


def test_no_other_framework_is_imported(said: dict[str, object]) -> None:
    assert said["imported"] == []
