"""Two folders of arrays, a file a job, compared by names, shapes, dtypes and bits."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Compared:
    """One job.

    Attributes:
        job: Its name.
        arrays: How many arrays the new tree has of it.
        differences: What differs, a line each.
        missing: Whether the old tree has no such job, so that nothing could be compared.
    """

    job: str
    arrays: int
    differences: tuple[str, ...]
    missing: bool = False

    def __str__(self) -> str:
        if self.missing:
            return f"{self.job}: NOT COMPARED, the old commit has no such job"
        if self.differences:
            return "\n".join(
                [f"{self.job}: DIFFERS in {len(self.differences)} of {self.arrays} arrays", *self.differences]
            )
        return f"{self.job}: same bits: {self.arrays} arrays"


def compare(old: Path, new: Path, jobs: Iterable[str] = ()) -> list[Compared]:
    """These jobs, whether the folders have them or not; none are named: every job that either has."""
    names = set(jobs) or {file.stem for folder in (old, new) for file in folder.glob("*.npz")}
    return [_compare_job(name, _read(old, name), _read(new, name)) for name in sorted(names)]


def _read(folder: Path, job: str) -> dict[str, np.ndarray] | None:
    if not (folder / f"{job}.npz").exists():
        return None
    with np.load(folder / f"{job}.npz") as found:
        return {name: found[name] for name in found.files}


def _compare_job(job: str, old: Mapping[str, np.ndarray] | None, new: Mapping[str, np.ndarray] | None) -> Compared:
    if new is None or not new:
        return Compared(job, 0, (f"  {job}: this tree has no arrays of it",))
    if old is None:
        return Compared(job, len(new), (), missing=True)
    differences = [f"  {name}: in the old commit alone" for name in sorted(old.keys() - new.keys())]
    differences += [f"  {name}: in this tree alone" for name in sorted(new.keys() - old.keys())]
    differences += [
        line for name in sorted(old.keys() & new.keys()) if (line := _difference(name, old[name], new[name]))
    ]
    return Compared(job, len(new), tuple(differences))


def _difference(name: str, old: np.ndarray, new: np.ndarray) -> str:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"  {name}: was {old.dtype} {list(old.shape)}, is {new.dtype} {list(new.shape)}"
    if old.tobytes() == new.tobytes():
        return ""
    differ = (_bytes(old) != _bytes(new)).any(axis=1)
    with np.errstate(all="ignore"):
        largest = np.max(np.abs(old.ravel()[differ].astype(np.float64) - new.ravel()[differ].astype(np.float64)))
    return f"  {name}: {differ.sum()} of {old.size} elements differ, the largest by {largest:.3g}"


def _bytes(array: np.ndarray) -> np.ndarray:
    """uint8 `[elements, bytes of one]`."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.itemsize)


def with_one_bit_changed(folder: Path, to: Path, job: str, chosen: Callable[[int], int]) -> str:
    """Writes the arrays of a job to another folder with one bit changed; which one says `chosen(number of them)`.

    Returns:
        The name of the array.
    """
    arrays = _read(folder, job) or {}
    names = sorted(name for name, array in arrays.items() if array.nbytes)
    name = names[chosen(len(names))]
    changed = bytearray(arrays[name].tobytes())
    bit = chosen(8 * len(changed))
    changed[bit // 8] ^= 1 << bit % 8
    arrays[name] = np.frombuffer(bytes(changed), arrays[name].dtype).reshape(arrays[name].shape)
    np.savez(to / f"{job}.npz", **arrays)  # type: ignore[arg-type]
    return name
