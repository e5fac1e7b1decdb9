"""A job with rows in Redis whose server dies in the middle, and an asynchronous one."""

import json
import re
from pathlib import Path

import pytest

from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.process.exit_codes import ExitCode
from tests.elastable.click_job import RECORDS
from tests.elastable.processes import CLICK_JOB, Hold, counted_by_workers, elastable, run_elastable, succeeded
from tests.servers import running_server


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
