"""Workers that come late, die or do not fit; masters that die."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastable.embedding_store.errors import PermissionDenied
from elastable.master.api import WorkerIdentity
from elastable.master.rpc.client import MasterClient
from elastable.process.exit_codes import ExitCode
from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import (
    CLICK_JOB,
    Finished,
    Hold,
    Running,
    elastable,
    run_elastable,
    wait_until,
)

HELD_AT = 9


@dataclass
class Accidents:
    """One job that met with everything that may happen to workers, and finished."""

    home: Path
    master: Running
    killed: Running
    late: Running
    terminated: Running
    status: Finished
    looked_up: Finished
    other_file: Finished
    other_length: Finished


@pytest.fixture(scope="module")
def accidents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accidents]:
    """A master is held; its first worker is killed, two are refused, one leaves; one comes late and ends the job."""
    home = tmp_path_factory.mktemp("accidents")
    hold = Hold(home / "hold", HELD_AT)
    copied = home / "click_job.py"
    copied.write_text(f"open({str(home / 'ran')!r}, 'w').close()\n" + CLICK_JOB.read_text())
    master = ("master", CLICK_JOB, *JOB, "--run-dir", home / "runs", "--listen", "127.0.0.1:0", "--no-export")
    with ExitStack() as processes:
        job = processes.enter_context(elastable(home, *master, env=hold.environment, name="master"))
        worker = ("worker", CLICK_JOB, "--master", job.address(), "--deadline", "60")
        first = processes.enter_context(elastable(home, *worker, name="first"))
        hold.wait(job)
        other_file = run_elastable("worker", copied, *worker[2:])
        other_length = run_elastable(*worker, env={"EXTRA": "5"})
        status = run_elastable("status", "--master", job.address(), "--json")
        looked_up = run_elastable("lookup", "users", "3", "--master", job.address())
        first.signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        late = processes.enter_context(elastable(home, *worker, name="late"))
        wait_until(lambda: late.process.poll() is not None or _joined(job, late.pid), "late worker", late)
        leaving = processes.enter_context(elastable(home, *worker, "--http", "127.0.0.1:0", name="leaving"))
        wait_until(lambda: leaving.process.poll() is not None or "http://" in leaving.out, "leaving worker", leaving)
        leaving.signal(signal.SIGTERM)
        leaving.wait()
        hold.go()
        assert job.wait() == 0, job.err
        late.wait()
        yield Accidents(home, job, first, late, leaving, status, looked_up, other_file, other_length)


def _joined(master: Running, pid: int) -> bool:
    with MasterClient(master.address(), deadline_s=60) as client:
        return pid in [worker.identity.pid for worker in client.status().workers]


@pytest.mark.timeout(900)
class TestAccidents:
    def test_the_job_ends_with_the_numbers_of_an_undisturbed_one(self, accidents: Accidents, trained: Trained) -> None:
        run = accidents.home / "runs" / "latest"
        trained.require_same_numbers(run / "checkpoints")
        assert json.loads((run / "result.json").read_text())["workers"] == 2

    def test_a_late_worker_computes_the_rest_and_leaves(self, accidents: Accidents) -> None:
        assert accidents.late.wait() == 0, accidents.late.err
        assert "micro-batches counted; the job is over" in accidents.late.err

    def test_a_terminated_worker_leaves_although_the_job_stands_still(self, accidents: Accidents) -> None:
        assert accidents.terminated.wait() == ExitCode.INTERRUPTED, accidents.terminated.err
        assert "leaving after this micro-batch" in accidents.terminated.err

    def test_status(self, accidents: Accidents) -> None:
        assert accidents.status.code == 0, accidents.status.err
        output = json.loads(accidents.status.out)
        assert (output["version"], output["versions_total"], output["state"]) == (HELD_AT, 40, "training")
        assert (output["epoch"], output["epochs"], output["mode"]) == (0, 2, "sync")
        assert output["records_trained"] == HELD_AT * 64
        assert [worker["pid"] for worker in output["workers"]] == [accidents.killed.pid]
        assert output["workers"][0]["micro_batches"] == HELD_AT * 2
        assert {"loss", "auc"} <= set(output["metrics"])

    def test_a_master_says_why_workers_failed(self, accidents: Accidents) -> None:
        output = json.loads(accidents.status.out)["refusals"]
        assert [(refusal["error"], refusal["count"]) for refusal in output] == [("ModelError", 1), ("BadInput", 1)]
        assert "differs from the master's" in output[0]["message"]
        assert re.search(
            r"worker pid \d+ on \S+ failed: ModelError: \S+click_job.py differs from", accidents.master.out
        )
        assert re.search(r"worker pid \d+ on \S+ failed: BadInput: data\('train'\) holds 1285", accidents.master.out)

    def test_lookup_at_the_master(self, accidents: Accidents) -> None:
        assert accidents.looked_up.code == 0, accidents.looked_up.err
        output = json.loads(accidents.looked_up.out)
        assert (output["table"], output["id"], len(output["row"])) == ("users", 3, 8)

    def test_a_worker_with_another_model_file_is_refused_alone(self, accidents: Accidents) -> None:
        assert accidents.other_file.code == 4
        assert "click_job.py differs from the master's" in accidents.other_file.err
        assert "was not run" in accidents.other_file.err
        assert not (accidents.home / "ran").exists()

    def test_a_worker_with_other_data_is_refused_alone(self, accidents: Accidents) -> None:
        assert accidents.other_length.code == 3
        assert "data('train') holds 1285 records here and 1280 at the master" in accidents.other_length.err


@pytest.mark.timeout(900)
def test_all_workers_killed(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold", 2)
    arguments = ("train", CLICK_JOB, "--workers", "2", *JOB, "--run-dir", tmp_path / "runs", "--no-export")
    with elastable(tmp_path, *arguments, env=hold.environment) as train:
        hold.wait(train)
        workers = train.children()
        assert len(workers) == 2
        address = train.address()
        # Whoever else can reach the port sees the job, and takes no part in it: only its own workers have the token.
        with MasterClient(address, deadline_s=60) as stranger:
            assert stranger.status().version == 2
            for attempt in (
                lambda: stranger.join(WorkerIdentity("stranger")),
                lambda: stranger.report_failure("stranger", RuntimeError("forged"), fatal=True),
                lambda: stranger.stop("no more"),
            ):
                with pytest.raises(PermissionDenied, match=r"this caller's is reader \(no token\)"):
                    attempt()
        with (tmp_path / "runs" / "latest" / "worker-0.log").open("a") as log:
            log.write("the last thing it said [n]\n")
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        hold.go()
        assert train.wait() == 7
        for number, worker in enumerate(workers):
            assert f"worker {number} (pid {worker}) ended with exit code -9" in train.out
        assert "every worker has ended before the job" in train.err
        assert "the last thing it said [n]" in train.err
