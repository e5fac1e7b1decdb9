"""A master that is killed and started again elsewhere: its workers go on to the same model, bit by bit."""

import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastable.master.rpc.client import MasterClient
from tests.elastable.conftest import JOB, Trained
from tests.elastable.monitoring.http_client import get
from tests.elastable.processes import CLICK_JOB, Hold, Running, elastable, wait_until
from tests.ports import free_address
from tests.untyped import Parsed


def state_of(job: Running) -> Parsed:
    found: Parsed = json.loads(get(f"{job.url()}state").text)
    return found


@pytest.mark.timeout(900)
def test_workers_go_on_with_the_master_that_takes_over(trained: Trained, tmp_path: Path) -> None:
    """It was killed at version 11; at version 31 a worker is stopped for longer than its lease, and revived."""
    addresses = [free_address(), free_address()]
    folders = ("--run-dir", tmp_path / "runs", "--checkpoint-dir", tmp_path / "checkpoints")
    options = ("--checkpoint-every", "4", "--resume", "--no-export", "--lease", "2", "--http", "127.0.0.1:0")
    words = ("master", CLICK_JOB, *JOB, *folders, *options, "--deadline", "60")
    with ExitStack() as processes:

        def start(name: str, *words: str | Path, env: dict[str, str] | None = None) -> Running:
            return processes.enter_context(elastable(tmp_path, *words, env=env, name=name))

        holds = [Hold(tmp_path / f"hold-{version}", version) for version in (11, 31)]
        first = start("first", *words, "--listen", addresses[0], env=holds[0].environment)
        of_workers = ("worker", CLICK_JOB, "--master", ",".join(addresses), "--deadline", "60")
        workers = [start(f"worker-{number}", *of_workers) for number in range(2)]
        holds[0].wait(first)
        with MasterClient(addresses[0], deadline_s=60) as client:
            wait_until(lambda: len(client.status().workers) == 2, "both workers", first)
        wait_until(lambda: len(state_of(first)["checkpoints"]) == 2, "the checkpoint that is being written", first)
        before = state_of(first)
        first.signal(signal.SIGKILL)
        first.wait()
        second = start("second", *words, "--listen", addresses[1], env=holds[1].environment)
        holds[1].wait(second)
        after = state_of(second)
        with MasterClient(addresses[1], deadline_s=60) as client:
            wait_until(lambda: len(client.status().workers) == 2, "both workers", second)
            workers[0].signal(signal.SIGSTOP)
            try:
                holds[1].go()
                # What the stopped one holds is computed by the other one, once its lease has ended.
                wait_until(lambda: client.status().version > 31, "version without the stopped worker", second)
            finally:
                workers[0].signal(signal.SIGCONT)
        codes = [process.wait() for process in (second, *workers)]
    assert codes == [0, 0, 0], "\n".join(process.err for process in (first, second, *workers))
    trained.require_same_numbers(tmp_path / "checkpoints")
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result["metrics"] == trained.result["metrics"]
    assert "resuming at version" not in first.out
    (begun,) = re.findall(r"resuming at version (\d+)", second.out)
    assert int(begun) == 8
    # The page has the checkpoints and the curves of before.
    earlier = [checkpoint for checkpoint in after["checkpoints"] if checkpoint["seconds"] is None]
    assert [(each["version"], each["bytes"] > 0) for each in earlier] == [(8, True), (4, True)]
    curves = {name: [point for point in points if point[0] <= 8] for name, points in before["curves"].items()}
    assert any(curves.values())
    assert {name: after["curves"][name][: len(points)] for name, points in curves.items()} == curves
    for worker in workers:  # the same processes, both of which did their part
        assert worker.err.count("joining again") >= 1
        (counted,) = re.findall(r"(\d+) micro-batches counted; the job is over", worker.err)
        assert int(counted) > 10
