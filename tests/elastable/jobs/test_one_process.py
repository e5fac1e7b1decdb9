"""`elastable train --workers 1`: a master that computes itself, and takes other workers all the same."""

import json
from pathlib import Path

from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.master.rpc.client import MasterClient
from elastable.process.exit_codes import ExitCode
from tests.certificates import TOKEN
from tests.elastable.conftest import JOB, Trained
from tests.elastable.monitoring.http_client import get
from tests.elastable.processes import CLICK_JOB, Hold, elastable, run_elastable, wait_until

HELD_AT = 9


def test_it_listens_and_a_worker_that_joins_changes_no_bit(trained: Trained, tmp_path: Path) -> None:
    hold, token = Hold(tmp_path / "hold", HELD_AT), tmp_path / "token"
    token.write_text(TOKEN)
    env = {"ELASTABLE_WORKER_TOKEN_FILE": str(token)}
    words = (
        "train",
        CLICK_JOB,
        "--workers",
        "1",
        *JOB,
        "--http",
        "127.0.0.1:0",
        "--evaluate-every",
        "8",
        "--no-export",
    )
    runs = ("--run-dir", tmp_path / "runs")
    with elastable(tmp_path, *words, *runs, env={**env, **hold.environment}) as train:
        hold.wait(train)
        assert train.children() == []
        metrics = get(f"{train.url()}metrics", {"Authorization": f"Bearer {TOKEN}"}).text
        assert f'elastable_worker_micro_batches_total{{kind="train",outcome="counted"}} {2 * HELD_AT:.1f}' in metrics
        another = ("worker", CLICK_JOB, "--master", train.address(), "--deadline", "60")
        client = MasterClient(train.address(), 60.0, Credentials(worker_token=TOKEN))
        with client, elastable(tmp_path, *another, env=env, name="another") as joined:
            (own,) = client.status().workers
            assert (own.identity.pid, own.micro_batches) == (train.pid, 2 * HELD_AT)

            def works() -> bool:
                leases = {worker.identity.pid: worker.leases for worker in client.status().workers}
                return leases.get(joined.pid, 0) > 0 or joined.process.poll() is not None

            wait_until(works, "worker that joins", joined)
            hold.go()
            assert (train.wait(), joined.wait()) == (0, 0), train.err + joined.err
    run = (tmp_path / "runs" / "latest").resolve()
    result = json.loads((run / "result.json").read_text())
    assert (result["workers"], result["metrics"]) == (2, trained.result["metrics"])
    trained.require_same_numbers(run / "checkpoints")


def test_an_error_of_the_model_is_not_taken_for_one_of_a_callback(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from tests.elastable.click_job import *\n"
        "from elastable import Reader\n"
        "class Failing(Reader):\n"
        "    def __init__(self, of): self.of = of\n"
        "    def __len__(self): return RECORDS\n"
        "    def take(self, rows):\n"
        "        if len(rows) > 2: raise RuntimeError('the disk is gone')\n"
        "        x, y = self.of\n"
        "        return {name: column[rows] for name, column in x.items()}, y[rows]\n"
        "whole = data\n"
        "def data(split): return Failing(whole(split)) if split == 'train' else None\n"
    )
    ran = run_elastable("train", job, "--workers", "1", "--run-dir", tmp_path / "runs")
    assert ran.code == ExitCode.BAD_MODEL, ran.err
    assert "job.py: training raised RuntimeError at job.py:7: the disk is gone" in ran.err
    assert "Traceback" in ran.err
