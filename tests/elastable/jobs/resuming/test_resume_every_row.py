"""Jobs whose rows follow every step, killed and resumed: to the bit those that were never killed."""

import json
from pathlib import Path

import pytest

from tests.elastable.kept_jobs import assert_same, kept, killed_at, trained

MODEL = Path(__file__).with_name("every_row_job.py")
VERSIONS = (5, 10, 15, 20, 24)  # of checkpoints; epochs end at 12 and 24


OPTIONS = (
    *("--epochs", "2", "--micro-batch-size", "8", "--grads-to-wait", "2", "--seed", "5"),
    *("--checkpoint-every", "5"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job that nothing happened to."""
    home = tmp_path_factory.mktemp("whole")
    trained(MODEL, home, *OPTIONS, "--workers", "1")
    return home


@pytest.mark.parametrize(
    ("version", "workers", "store"), [(5, 2, "memory"), (15, 1, "encoding:memory,file://{home}/rows,memory")]
)
def test_a_killed_job_ends_with_its_bits(version: int, workers: int, store: str, whole: Path, tmp_path: Path) -> None:
    """A job that was killed after a checkpoint has that one and the older ones."""
    killed_at(version, whole, tmp_path)
    again = ("--resume", "--workers", str(workers), "--store", store.format(home=tmp_path))
    assert f"resuming at version {version}" in trained(MODEL, tmp_path, *OPTIONS, *again)
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result["version"] == VERSIONS[-1]
    assert len(list((tmp_path / "saved").glob("ckpt-*"))) == len(VERSIONS)
    for saved in VERSIONS:
        ours, theirs = kept(tmp_path, saved), kept(whole, saved)
        assert_same(ours, theirs)
        for table in ours.manifest.tables:
            assert ours.table_state(table).untouched_decay is not None
            assert ours.table_state(table) == theirs.table_state(table)
