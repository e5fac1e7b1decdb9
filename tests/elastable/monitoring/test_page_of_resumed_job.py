"""What the live page says of a job that was killed and resumed, and of a worker that was killed while it started."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.elastable.conftest import JOB
from tests.elastable.monitoring.http_client import get
from tests.elastable.monitoring.test_metrics import url_of
from tests.elastable.processes import CLICK_JOB, Hold, Running, elastable, wait_until
from tests.untyped import Parsed

pytestmark = pytest.mark.process

HELD_AT, SAVED_AT, AGAIN_AT = 26, 24, 30  # an epoch has 20 versions


def state_of(job: Running) -> Parsed:
    return json.loads(get(f"{url_of(job)}state").text)


@pytest.mark.timeout(900)
def test_a_resumed_job_shows_its_checkpoints_and_curves_and_who_died_while_it_started(tmp_path: Path) -> None:
    saved = ("--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", "8", "--resume")
    job = ("train", CLICK_JOB, *JOB, "--workers", "2", "--run-dir", tmp_path / "runs", "--no-export", *saved)
    hold = Hold(tmp_path / "hold", HELD_AT)
    with elastable(tmp_path, *job, "--http", "127.0.0.1:0", env=hold.environment, name="first") as first:
        wait_until(lambda: len(first.children()) == 2 or first.process.poll() is not None, "two workers", first)
        killed = first.children()[1]
        os.kill(killed, signal.SIGKILL)
        hold.wait(first)
        wait_until(lambda: len(state_of(first)["checkpoints"]) == 3, "the checkpoint that is being written", first)
        state = state_of(first)
        (gone,) = [worker for worker in state["workers"] if worker["state"] == "gone"]
        assert (gone["pid"], gone["silent_s"]) == (killed, None)
        (problem,) = state["problems"]
        assert problem["who"].endswith(f"pid {killed}")
        assert "It ended with exit code -9" in problem["what"]
        assert "worker-1.log" in problem["what"]
        assert [checkpoint["version"] for checkpoint in state["checkpoints"]] == [SAVED_AT, 16, 8]
        first.signal(signal.SIGKILL)
        first.wait()
    again = Hold(tmp_path / "again", AGAIN_AT)
    with elastable(tmp_path, *job, "--http", "127.0.0.1:0", env=again.environment, name="second") as second:
        again.wait(second)
        resumed = state_of(second)
        newest = resumed["checkpoints"][0]
        assert (newest["version"], newest["seconds"]) == (SAVED_AT, None)
        assert [checkpoint["version"] for checkpoint in resumed["checkpoints"]] == [SAVED_AT, 16, 8]
        assert newest["bytes"] > 0
        assert state["checkpoints"][0]["at"] == pytest.approx(newest["at"], abs=60)
        for name, points in state["curves"].items():
            before = [point for point in points if point[0] <= SAVED_AT]
            assert before
            assert resumed["curves"][name][: len(before)] == before
        again.go()
        assert second.wait() == 0, second.err
