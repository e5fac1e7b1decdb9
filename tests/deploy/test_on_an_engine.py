"""`make compose-test` as a test: `pytest -m compose`, left out of every other run as it takes minutes."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 3600


@pytest.mark.compose
@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_a_killed_worker_and_four_workers_train_the_same_numbers() -> None:
    subprocess.run([ROOT / "deploy/compose-test.sh"], check=True, timeout=LIMIT_SECONDS)
