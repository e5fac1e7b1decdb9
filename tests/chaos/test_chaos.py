"""A bounded part of `make chaos`; see docs/testing.md."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.schedules import schedule_of
from tests.chaos.stores import KINDS
from tests.servers import redis_binary, valkey_binary

_LIMIT_S = 900.0
_KINDS = ["redis", "servers", "shards", "flushed"]
_SCHEDULES = ["--schedules", "4", "--first-seed", "23158", "--jobs", "4"]
_SCHEDULES += [word for kind in _KINDS for word in ("--kind", kind)]


def chaos(server_binary: Path, words: list[str], module: str = "tests.chaos") -> str:
    """What `make chaos` prints, or another one of its kind. It forks, so it needs a separate process."""
    assert server_binary in (redis_binary(), valkey_binary())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EQUALITY_")}
    ran = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=Path(__file__).parents[2],
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip()


_OLDER = {"memory": "f6082e8537b87aeb", "redis": "ca5ef36fa88abbdc"}
"""The first schedules of kinds that have been run most: a seed that someone noted must mean the same for ever."""


def test_a_schedule_is_a_pure_function_of_its_seed() -> None:
    for kind, digest in _OLDER.items():
        description = "\n".join(str(schedule_of(kind, seed)) for seed in range(300))
        assert hashlib.sha256(description.encode()).hexdigest()[:16] == digest
    for kind in KINDS:
        assert schedule_of(kind, 17) == schedule_of(kind, 17)
        assert len({str(schedule_of(kind, seed)) for seed in range(50)}) == 50


@pytest.mark.timeout(960)
def test_disturbed_jobs_end_as_undisturbed_ones(server_binary: Path) -> None:
    tally = chaos(server_binary, _SCHEDULES)
    assert re.search(r"DIVERGENCES +0 of 4 schedules", tally), tally
    assert re.search(r"keras +[1-9]", tally), tally
    assert re.search(r"kill master +[1-9]", tally), tally


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_a_job_on_events_ends_as_an_undisturbed_one(server_binary: Path) -> None:
    words = ["--events", "6000", "--kills", "8", "--micro-batch-size", "64"]
    assert "DIVERGENCES 0" in chaos(server_binary, words, "tests.chaos.stream")


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_errors_on_purpose_are_noticed(server_binary: Path) -> None:
    """A suite that does not notice a record trained twice, or slots that are lost, notices nothing."""
    noticed = chaos(server_binary, ["--noticed"])
    assert "not reported right 0" in noticed
