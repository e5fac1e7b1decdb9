"""A master that is killed and started again, here and elsewhere: its workers go on to the same model, bit by bit."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastable.master.wire.client import MasterClient
from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB, Hold, Running, elastable, wait_until
from tests.ports import free_address

LEASE_S = 2


@dataclass
class Restarts:
    """One job, of three lives of its master and one of each worker."""

    home: Path
    masters: list[Running]
    workers: list[Running]
    codes: list[int]


@pytest.fixture(scope="module")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    """A master is killed at version 11, its follower at 22, both at one address; the third is at another one.

    While the third is there one worker is stopped for longer than its lease, and revived.
    """
    home = tmp_path_factory.mktemp("restarts")
    first, second = free_address(), free_address()
    options = ["--run-dir", home / "runs", "--checkpoint-dir", home / "checkpoints", "--checkpoint-every", "4"]
    options += ["--resume", "--no-export", "--lease", LEASE_S, "--deadline", "60"]
    masters: list[Running] = []
    with ExitStack() as processes:

        def start(address: str, version: int) -> Hold:
            hold = Hold(home / f"hold-{version}", version)
            arguments = ("master", CLICK_JOB, *JOB, *options, "--listen", address)
            name = f"master-{version}"
            masters.append(
                processes.enter_context(elastable(home, *map(str, arguments), env=hold.environment, name=name))
            )
            if not workers:
                words = ("worker", str(CLICK_JOB), "--master", f"{first},{second}", "--deadline", "60")
                both = [elastable(home, *words, name=f"w{number}") for number in range(2)]
                workers.extend(map(processes.enter_context, both))
            hold.wait(masters[-1])
            with MasterClient(address, deadline_s=60) as client:
                wait_until(lambda: len(client.status().workers) == 2, "both workers", masters[-1])
            return hold

        workers: list[Running] = []
        for version in (11, 22):
            start(first, version)
            masters[-1].signal(signal.SIGKILL)
            masters[-1].wait()
        hold = start(second, 31)
        with MasterClient(second, deadline_s=60) as client:
            workers[0].signal(signal.SIGSTOP)
            try:
                hold.go()
                # What the stopped one holds is computed by the other one, once its lease has ended.
                wait_until(lambda: client.status().version > 31, "version without the stopped worker", masters[-1])
            finally:
                workers[0].signal(signal.SIGCONT)
        codes = [masters[-1].wait(), *(worker.wait() for worker in workers)]
        yield Restarts(home, masters, workers, codes)


@pytest.mark.timeout(900)
class TestRestarts:
    def test_everybody_ends_well(self, restarts: Restarts) -> None:
        errors = [process.err for process in (*restarts.masters, *restarts.workers)]
        assert restarts.codes == [0, 0, 0], "\n".join(errors)

    def test_the_model_is_that_of_an_undisturbed_job(self, restarts: Restarts, trained: Trained) -> None:
        trained.require_same_numbers(restarts.home / "checkpoints")
        result = json.loads((restarts.home / "runs" / "latest" / "result.json").read_text())
        assert result["metrics"] == trained.result["metrics"]

    def test_the_masters_began_where_a_checkpoint_was(self, restarts: Restarts) -> None:
        begun = [re.findall(r"resuming at version (\d+)", master.out) for master in restarts.masters]
        assert begun[0] == []
        assert [int(versions[0]) % 4 for versions in begun[1:]] == [0, 0]
        assert 0 < int(begun[1][0]) <= 11 < int(begun[2][0]) <= 22

    def test_the_workers_are_the_same_processes_and_both_did_their_part(self, restarts: Restarts) -> None:
        assert min(worker.err.count("joining again") for worker in restarts.workers) >= 2
        for worker in restarts.workers:
            (counted,) = re.findall(r"(\d+) micro-batches counted; the job is over", worker.err)
            assert int(counted) > 10
