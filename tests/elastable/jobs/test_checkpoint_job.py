"""Jobs that write increments, go on from one, and begin with rows of another model."""

import json
import shutil
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from elastable.master.checkpoints.checkpoint import list_checkpoints, open_checkpoint
from tests.elastable.kept_jobs import assert_same, kept, killed_at, trained
from tests.elastable.processes import CLICK_JOB

MODEL = Path(__file__).with_name("large_vocabulary.py")


OPTIONS = (
    *("--epochs", "1", "--micro-batch-size", "8", "--grads-to-wait", "2", "--workers", "1"),
    *("--checkpoint-every", "3", "--full-every", "3"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    trained(MODEL, home, *OPTIONS, "--checkpoint-dir", f"file://{home}/saved")
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
    killed_at(15, whole.parent, tmp_path)
    assert kept(tmp_path).manifest.kind == "increment"
    assert "resuming at version 15" in trained(MODEL, tmp_path, *OPTIONS, "--resume")
    for version, kind in ((18, "increment"), (20, "full")):
        assert kept(tmp_path, version).manifest.kind == kind
        assert_same(kept(tmp_path, version), kept(whole.parent, version))


def test_a_damaged_one_is_refused_by_command(whole: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(whole, saved)
    (saved / "ckpt-0000000020" / "dense.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"dense.safetensors: missing; an older checkpoint .* \(version 18\)"):
        prepare_job(JobOptions(MODEL, checkpoint_dir=saved, resume=True, micro_batch_size=8, grads_to_wait=2))


def test_another_model_is_recognized_by_its_table(whole: Path) -> None:
    options = JobOptions(CLICK_JOB, checkpoint_dir=whole, resume=True, micro_batch_size=8, grads_to_wait=2)
    with pytest.raises(Exception, match="cannot be resumed with other numbers"):
        prepare_job(options)


def test_a_warm_start_by_options(whole: Path, tmp_path: Path) -> None:
    prepared = prepare_job(JobOptions(MODEL, seed=9, warm_start=whole, warm_tables=("users",)))
    with prepared.store as store:
        assert store.version() == 0
        assert store.row_count("users") == open_checkpoint(whole).manifest.tables["users"].rows
        assert store.row_count("any") == 0
    with pytest.raises(CheckpointError, match="its rows have 4 values in the checkpoint and 8 in the model"):
        prepare_job(JobOptions(CLICK_JOB, warm_start=whole))
    (locations := tmp_path / "locations.toml").write_text('overrides.users = "worker"')
    with pytest.raises(BadInput, match="table users stays on the workers, as a variable, and takes no rows"):
        prepare_job(JobOptions(MODEL, warm_start=whole, locations=locations))
