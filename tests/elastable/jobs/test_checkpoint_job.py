"""Jobs that write increments, go on from one, and begin with rows of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from elastable.embedding_store.errors import CheckpointError
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from elastable.master.checkpoints.checkpoint import list_checkpoints, open_checkpoint
from elastable.master.checkpoints.comparing import compare_dense, compare_tables
from tests.elastable.processes import CLICK_JOB, Finished, run_elastable

MODEL = Path(__file__).with_name("large_vocabulary.py")


def train(home: Path, url: str, *more: str) -> Finished:
    options = ("--epochs", "1", "--micro-batch-size", "8", "--grads-to-wait", "2", "--workers", "1", "--no-export")
    saving = ("--checkpoint-every", "3", "--full-every", "3", "--keep", "0", "--checkpoint-dir", url)
    return run_elastable("train", MODEL, *options, *saving, "--run-dir", home / "runs", "--deadline", "60", *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job of 20 versions that nothing happened to."""
    home = tmp_path_factory.mktemp("whole")
    ran = train(home, f"file://{home}/saved")
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    result = json.loads((home / "runs" / "latest" / "result.json").read_text())
    assert result["checkpoint"] == str(home / "saved" / "ckpt-0000000020")
    return home / "saved"


def test_of_three_one_is_full(whole: Path) -> None:
    found = [listed.checkpoint for listed in list_checkpoints(whole, verify=True)]
    kinds = {one.version: one.manifest.kind for one in found if one is not None}
    assert [version for version, kind in kinds.items() if kind == "full"] == [3, 12, 20]
    assert [version for version, kind in kinds.items() if kind == "increment"] == [6, 9, 15, 18]
    assert any(one.manifest.tables["any"].live for one in found if one is not None)


def test_a_job_that_goes_on_from_an_increment_ends_with_the_same_numbers(whole: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(whole, saved)
    for version in (18, 20):
        shutil.rmtree(saved / f"ckpt-{version:010d}")
    assert open_checkpoint(saved).manifest.kind == "increment"
    ran = train(tmp_path, str(saved), "--resume")
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    assert "resuming at version 15" in ran.out
    for name, kind in (("ckpt-0000000018", "increment"), ("ckpt-0000000020", "full")):
        ours, theirs = open_checkpoint(saved / name), open_checkpoint(whole / name)
        assert ours.manifest.kind == kind
        assert compare_dense(ours, theirs) == []
        assert [table.same for table in compare_tables(ours, theirs)] == [True, True]


def test_a_damaged_one_is_refused_by_command(whole: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(whole, saved)
    (saved / "ckpt-0000000020" / "dense.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"dense.safetensors: missing; an older checkpoint .* \(version 18\)"):
        prepare_job(JobOptions(MODEL, checkpoint_dir=saved, resume=True, micro_batch_size=8, grads_to_wait=2))


def test_another_model_is_told_by_its_table(whole: Path) -> None:
    options = JobOptions(CLICK_JOB, checkpoint_dir=whole, resume=True, micro_batch_size=8, grads_to_wait=2)
    with pytest.raises(Exception, match="cannot be resumed with other numbers"):
        prepare_job(options)


def test_a_warm_start_by_options(whole: Path) -> None:
    prepared = prepare_job(JobOptions(MODEL, seed=9, warm_start=whole, warm_tables=("users",)))
    with prepared.store as store:
        assert store.version() == 0
        assert store.row_count("users") == open_checkpoint(whole).manifest.tables["users"].rows
        assert store.row_count("any") == 0
    with pytest.raises(CheckpointError, match="its rows have 4 values in the checkpoint and 8 in the model"):
        prepare_job(JobOptions(CLICK_JOB, warm_start=whole))
