"""A bounded part of `make chaos`; see docs/testing.md."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.schedules import KINDS, schedule_of
from tests.servers import redis_binary, valkey_binary

_LIMIT_S = 280.0


def chaos(*words: str) -> tuple[int, str]:
    """Runs `python -m tests.chaos`, which must fork and so needs a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EQUALITY_")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words],
        cwd=Path(__file__).parents[2],
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


_OLDER = {"memory": "f6082e8537b87aeb", "redis": "d7f3a765f0018fc9", "served": "8d1ba2dc33017d3d"}
"""The first schedules of kinds that have been run most: a seed that someone noted must mean the same for ever."""


def test_a_schedule_is_a_pure_function_of_its_seed() -> None:
    for kind, digest in _OLDER.items():
        told = "\n".join(str(schedule_of(kind, seed)) for seed in range(300))
        assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest
    for kind in KINDS:
        assert schedule_of(kind, 17) == schedule_of(kind, 17)
        assert len({str(schedule_of(kind, seed)) for seed in range(50)}) == 50


@pytest.mark.timeout(300)
def test_disturbed_jobs_end_as_undisturbed_ones(server_binary: Path) -> None:
    assert server_binary in (redis_binary(), valkey_binary())
    kinds = [*("memory", "redis", "served") * 3, "shards", "files", "every"]
    code, told = chaos(
        "--schedules",
        "12",
        "--first-seed",
        "320",
        "--jobs",
        "6",
        *(word for kind in kinds for word in ("--kind", kind)),
    )
    assert code == 0, told
    assert re.search(r"DIVERGENCES +0 of 12 schedules", told), told
    assert re.search(r"keras +[1-9]", told), told
    assert re.search(r"kill master +[1-9]", told), told


@pytest.mark.timeout(300)
def test_errors_on_purpose_are_noticed(server_binary: Path) -> None:
    """A suite that does not notice a record trained twice, or slots that are lost, notices nothing."""
    assert server_binary in (redis_binary(), valkey_binary())
    code, told = chaos("--noticed")
    assert code == 0, told
    assert "not told right 0" in told
