"""The comparison notices what it should; the jobs themselves run by `make same-bits`."""

from pathlib import Path

import numpy as np
import pytest

from tests.same_bits.comparison import compare, with_one_bit_changed

ARRAYS = {"rows/weights": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), "step": np.array(7)}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same job in two folders."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "job.npz", **ARRAYS)  # type: ignore[arg-type]
    return tmp_path / "old", tmp_path / "new"


def test_equal_arrays_are_the_same(folders: tuple[Path, Path]) -> None:
    assert [str(job) for job in compare(*folders)] == ["job: same bits: 2 arrays"]


@pytest.mark.parametrize("bit", [0, 31, 63])
@pytest.mark.parametrize("array", [0, 1])
def test_every_changed_bit_is_noticed(folders: tuple[Path, Path], array: int, bit: int) -> None:
    changed = with_one_bit_changed(folders[0], folders[1], "job", lambda count: array if count == 2 else bit)
    (job,) = compare(*folders)
    assert changed == sorted(ARRAYS)[array]
    assert len(job.differences) == 1
    assert f"{changed}: 1 of {ARRAYS[changed].size} elements differ, the largest by " in job.differences[0]


@pytest.mark.parametrize("value", [np.float32(-0.0), np.float32(np.nan)])
def test_zeros_differ_by_their_sign_and_nan_equals_itself(folders: tuple[Path, Path], value: np.float32) -> None:
    for folder in folders:
        np.savez(folder / "job.npz", only=np.full(2, value))
    assert not compare(*folders)[0].differences
    np.savez(folders[1] / "job.npz", only=np.array([value, 0.0], np.float32))
    assert len(compare(*folders)[0].differences) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"step": ARRAYS["step"]}, "rows/weights: in the old commit alone"),
        ({**ARRAYS, "more": np.zeros(1)}, "more: in this tree alone"),
        ({**ARRAYS, "step": np.array(7.0)}, "step: was int64 [], is float64 []"),
        ({**ARRAYS, "step": np.array([7])}, "step: was int64 [], is int64 [1]"),
    ],
)
def test_names_shapes_and_dtypes_count(folders: tuple[Path, Path], other: dict[str, np.ndarray], message: str) -> None:
    np.savez(folders[1] / "job.npz", **other)  # type: ignore[arg-type]
    assert [line.strip() for line in compare(*folders)[0].differences] == [message]


def test_a_missing_job_is_reported(folders: tuple[Path, Path]) -> None:
    (folders[0] / "job.npz").rename(folders[0] / "gone.npz")
    gone, job = compare(*folders)
    assert str(job) == "job: NOT COMPARED, the old commit has no such job"
    assert gone.differences == ("  gone: this tree has no arrays of it",)
    assert compare(*folders, ["unknown"])[0].differences
