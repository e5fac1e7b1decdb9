"""A job that is stopped, killed or loses its store ends, or goes on to the numbers of one that ran through."""

import json
import re
import shlex
import signal
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from elastable.embedding_store.errors import JobFailed
from elastable.jobs.worker_process import refuse_early_end
from elastable.master.api import JobStatus
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.rpc.client import MasterClient
from elastable.process.exit_codes import ExitCode
from tests.elastable.click_job import RECORDS
from tests.elastable.conftest import JOB, Trained
from tests.elastable.monitoring.http_client import get
from tests.elastable.processes import (
    CLICK_JOB,
    Hold,
    Running,
    counted_by_workers,
    elastable,
    is_running,
    run_elastable,
    succeeded,
    wait_until,
)
from tests.ports import free_address
from tests.servers import running_server
from tests.untyped import Parsed


def command_to_go_on(out: str) -> list[str]:
    """The words behind `elastable` of the command that an interrupted job shows."""
    (line,) = [line for line in out.splitlines() if line.startswith("elastable ")]
    return shlex.split(line)[1:]


def stopped_at(version: int, number: signal.Signals, home: Path, command: list[str], workers: int) -> list[str]:
    """Runs a command, sends it a signal at a version, and returns the command that it says goes on."""
    hold = Hold(home / f"hold-{version}", version)
    with elastable(home, *command, env=hold.environment, name=f"to-{version}") as train:
        hold.wait(train)
        children = train.children()
        assert len(children) == workers
        train.signal(number)
        hold.go()
        assert train.wait() == 130, train.err
        assert "stopping after this version" in train.out
    assert not any(is_running(pid) for pid in children)
    result = json.loads((home / "runs" / "latest" / "result.json").read_text())
    assert result["stopped"] in ("interrupted", "terminated")
    assert version <= result["version"] < 40
    assert f"{result['stopped']} at version {result['version']}; go on with:\n" in train.out
    again = command_to_go_on(train.out)
    saved = open_checkpoint(again[again.index("--checkpoint-dir") + 1]).address
    assert Path(saved).name == f"ckpt-{result['version']:010d}"
    return again


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interrupted_twice_and_resumed_equals_uninterrupted(trained: Trained, tmp_path: Path) -> None:
    # In the middle of the first epoch, and of the second; with other numbers of workers than the whole run.
    first = ["train", str(CLICK_JOB), *JOB, "--deadline", "60", "--run-dir", str(tmp_path / "runs"), "--no-export"]
    second = stopped_at(7, signal.SIGINT, tmp_path, [*first, "--overwrite", "--workers", "2"], workers=2)
    assert "--overwrite" not in second
    third = stopped_at(27, signal.SIGTERM, tmp_path, [*second, "--workers", "1"], workers=0)  # it is this process
    assert third[third.index("--workers") + 1] == "1"
    with elastable(tmp_path, *third, name="to-the-end") as train:
        assert train.wait() == 0, train.err
        assert "resuming at version" in train.out
        assert "go on with" not in train.out
    checkpoints = third[third.index("--checkpoint-dir") + 1]
    trained.require_same_numbers(checkpoints)
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result["metrics"] == trained.result["metrics"]
    # There is nothing left to do: it says what there was.
    succeeded(*third)
    saved = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert (saved["version"], saved["examples"]) == (40, 0)
    assert saved["metrics"] == result["metrics"]
    assert saved["auc"] == result["auc"]


@pytest.mark.parametrize(("state", "stopped", "again"), [
    ("stopping", "terminated", True),
    ("finished", "interrupted", True),
    ("finished", "an administrator's reason", False),
    ("finished", "", False),
])  # fmt: skip
def test_a_worker_is_started_again_where_its_master_will_be(state: str, stopped: str, again: bool) -> None:
    ended = JobStatus("j", state, "sync", 8, 40, 0, 2, 64, {}, (), "memory", stopped=stopped)
    expected = pytest.raises(JobFailed, match=f"was {stopped} at version 8 of 40") if again else nullcontext()
    with expected:
        refuse_early_end(ended)


# A job whose store outlives its master goes on there when the master is killed: nothing is lost, or trained twice


# Over Redis and over files tests/chaos kills masters.
@pytest.mark.timeout(900)
def test_killed_twice_and_resumed_equals_undisturbed(trained: Trained, tmp_path: Path) -> None:
    """The rows were in memory alone there; no checkpoint is written here before the end."""
    checkpoints, store = tmp_path / "checkpoints", f"memory?log={tmp_path / 'log'}&log_bytes=200KiB"
    places = ("--store", store, "--run-dir", tmp_path / "runs", "--checkpoint-dir", checkpoints, "--resume")
    job = ("train", CLICK_JOB, *JOB, "--deadline", "60", "--no-export", "--evaluate-every", "8", *places)
    for version, workers in ((7, "2"), (28, "1")):
        hold = Hold(tmp_path / f"hold-{version}", version)
        with elastable(tmp_path, *job, "--workers", workers, env=hold.environment, name=f"to-{version}") as train:
            hold.wait(train)
            train.signal(signal.SIGKILL)
            train.wait()
        assert not checkpoints.exists() or not list(checkpoints.glob("ckpt-*"))
    other = run_elastable("train", CLICK_JOB, *JOB[:-1], "8", "--workers", "1", *places, "--deadline", "5")
    assert other.code != 0
    assert "seed was 7 and is 8" in other.err
    # Not finished yet, so --rerun changes nothing.
    last = succeeded(*job, "--workers", "2", "--rerun")
    assert "resuming at version 28" in last.out
    trained.require_same_numbers(next(checkpoints.glob("ckpt-*")))
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result["metrics"] == trained.result["metrics"]


@pytest.mark.timeout(600)
def test_what_a_killed_master_has_started_ends_with_it(tmp_path: Path) -> None:
    """And not after the deadline, for which workers elsewhere wait for another master."""
    hold = Hold(tmp_path / "hold", 3)
    words = ("train", CLICK_JOB, *JOB, "--workers", "2", "--stores", "1", "--deadline", "3600", "--no-export")
    with elastable(tmp_path, *words, "--run-dir", tmp_path / "runs", env=hold.environment, new=True) as train:
        hold.wait(train)
        started = train.children()
        assert len(started) == 3, train.err
        assert all(map(is_running, started))
        train.signal(signal.SIGKILL)
        train.wait()
        wait_until(lambda: not any(map(is_running, started)), "end of workers and store server", train, limit_s=120.0)
    run = (tmp_path / "runs" / "latest").resolve()
    assert "the process that started this one has ended" in (run / "worker-0.log").read_text()
    assert "stopping after this version" in (run / "store-0.log").read_text()


# A master that is killed and started again elsewhere: its workers go on to the same model, bit by bit


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


# A job with rows in Redis whose server dies in the middle, and an asynchronous one


@pytest.mark.timeout(900)
def test_redis_dies_in_the_middle(server_binary: Path, tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold", 5)
    with running_server(server_binary, tmp_path / "redis") as server:
        # A login in the URL must not be shown to anyone.
        url = f"redis://:{'secret' * 2}@{server.address}?deadline=3"
        with server.client() as client:
            client.config_set("requirepass", "secret" * 2)
        job = ("train", CLICK_JOB, "--workers", "1", "--micro-batch-size", "32", "--grads-to-wait", "2", "--no-export")
        places = ("--store", url, "--run-dir", tmp_path / "runs", "--deadline", "10")
        with elastable(tmp_path, *job, *places, env=hold.environment) as train:
            hold.wait(train)
            output = run_elastable("status", "--master", train.address())
            server.kill()
            hold.go()
            assert train.wait() in (ExitCode.UNAVAILABLE, ExitCode.STORE_FAILED), train.err
    assert f"redis at {server.address}" in train.err
    assert "secret" not in output.out + output.err + train.out + train.err
    assert f"redis://***@{server.address}" in train.out
    lines = [json.loads(line) for line in (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["version"] <= 5 for line in lines)


@pytest.mark.timeout(900)
def test_an_asynchronous_job_counts_each_record_once_an_epoch(tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--mode", "async", "--epochs", "3", "--micro-batch-size", "32", "--no-export")
    ran = succeeded("train", CLICK_JOB, *arguments, "--run-dir", tmp_path)
    result = json.loads((tmp_path / "latest" / "result.json").read_text())
    assert result["mode"] == "async"
    assert result["examples"] == 3 * RECORDS
    assert result["version"] == 3 * RECORDS // 32
    counted = counted_by_workers((tmp_path / "latest").resolve())
    assert len(counted) == 2
    assert 1 <= result["workers"] <= sum(1 for count in counted if count)
    lines = [json.loads(line) for line in (tmp_path / "latest" / "metrics.jsonl").read_text().splitlines()]
    aucs = [line["val_auc"] for line in lines if line["kind"] == "epoch"]
    assert len(aucs) == 3
    assert aucs[-1] > 0.8
    progress = open_checkpoint(tmp_path / "latest").progress()
    assert (progress.records, progress.epoch, progress.done) == (3 * RECORDS, 3, ())
    assert len(progress.sequences) == result["workers"]
    assert sum(progress.sequences.values()) == result["version"]
    assert re.search(r"async, micro-batches of 32, 1 to a version", ran.out)
