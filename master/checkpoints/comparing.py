"""Compares two checkpoints: which tables, rows and tensors differ, and by how much."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.tables.row_blocks import joined_rows
from elastable.master.api import Tensor
from elastable.master.checkpoints.checkpoint import Checkpoint

_SHOWN_IDS = 5


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A dense tensor that is not the same in both.

    Attributes:
        difference: What differs: that one has it and the other not, dtypes or shapes, or values.
        largest: The largest absolute difference of two values; None: they cannot be compared.
        values: How many differ.
    """

    key: str
    difference: str
    largest: float | None = None
    values: int = 0


@dataclass(frozen=True, slots=True)
class TableDifference:
    """What differs between two tables of one name.

    Attributes:
        spec: Field of the spec -> (there, here), of fields that differ.
        only_first, only_second: Rows that the other one lacks.
        weights, slots: Rows of both that differ there.
        largest_weight, largest_slot: The largest absolute difference.
        first_ids: Some ids of rows that differ.
    """

    table: str
    spec: Mapping[str, tuple[object, object]]
    only_first: int = 0
    only_second: int = 0
    weights: int = 0
    slots: int = 0
    largest_weight: float = 0.0
    largest_slot: float = 0.0
    first_ids: tuple[int, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.spec or self.only_first or self.only_second or self.weights or self.slots)


def compare_dense(first: Checkpoint, second: Checkpoint) -> list[TensorDifference]:
    """Dense tensors that differ. Raises `CheckpointError` for a damaged file."""
    ours, theirs = first.dense(), second.dense()
    found = []
    for key in sorted({*ours, *theirs}):
        if key not in ours or key not in theirs:
            found.append(TensorDifference(key, f"only in the {'first' if key in ours else 'second'}"))
        elif _kind(ours[key]) != _kind(theirs[key]):
            found.append(TensorDifference(key, f"{_kind(ours[key])} and {_kind(theirs[key])}"))
        elif ours[key].tobytes() != theirs[key].tobytes():
            gaps = _gaps(ours[key], theirs[key])
            found.append(TensorDifference(key, "values", float(gaps.max(initial=0.0)), int((gaps > 0).sum())))
    return found


def compare_tables(first: Checkpoint, second: Checkpoint) -> list[TableDifference]:
    """Every table that either of them has, with what differs. Raises `CheckpointError` for a damaged file.

    One table at a time is in memory, of one of the checkpoints.
    """
    ours, theirs = first.manifest.tables, second.manifest.tables
    found = []
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            rows = (ours if name in ours else theirs)[name].rows
            difference = {"table": ("there", "missing") if name in ours else ("missing", "there")}
            found.append(TableDifference(name, difference, *((rows, 0) if name in ours else (0, rows))))
        else:
            found.append(_compare(first, second, name))
    return found


def _compare(first: Checkpoint, second: Checkpoint, name: str) -> TableDifference:
    spec = first.manifest.tables[name].spec
    differences = spec.differences(second.manifest.tables[name].spec)
    if spec.dim != second.manifest.tables[name].spec.dim:
        rows = (first.manifest.tables[name].rows, second.manifest.tables[name].rows)
        return TableDifference(name, differences, *rows)
    whole = joined_rows(spec, list(first.rows(name)))
    order = np.argsort(whole.ids)
    sorted_ids = whole.ids[order]
    both, only_second = 0, 0
    counts, largest, ids = [0, 0], [0.0, 0.0], list[int]()
    for block in second.rows(name):
        at = np.searchsorted(sorted_ids, block.ids)
        known = at < len(sorted_ids)
        known[known] = sorted_ids[at[known]] == block.ids[known]
        both, only_second = both + int(known.sum()), only_second + int((~known).sum())
        rows_at = order[at[known]]
        differing = np.zeros(len(rows_at), np.bool_)
        pairs = ((whole.weights[rows_at], block.weights[known]), (whole.slots[rows_at], block.slots[known]))
        for part, (one, other) in enumerate(pairs):
            moved, most = _rows_that_differ(one, other)
            counts[part], largest[part] = counts[part] + int(moved.sum()), max(largest[part], most)
            differing |= moved
        ids += block.ids[known][differing][: _SHOWN_IDS - len(ids)].tolist()
    return TableDifference(
        name,
        differences,
        only_first=len(whole.ids) - both,
        only_second=only_second,
        weights=counts[0],
        slots=counts[1],
        largest_weight=largest[0],
        largest_slot=largest[1],
        first_ids=tuple(ids),
    )


def _rows_that_differ(one: Float32, other: Float32) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], float]:
    """bool `[n]`: rows of two blocks that are not the same to the bit; and the largest absolute difference."""
    if one.shape != other.shape:
        return np.ones(len(one), np.bool_), float("inf")
    moved = (one.view(np.uint32) != other.view(np.uint32)).any(axis=1)
    return moved, float(_gaps(one[moved], other[moved]).max(initial=0.0))


def _gaps(one: Tensor, other: Tensor) -> Tensor:
    """Absolute differences as float64; infinite where one of two is not a number, 0 where both are the same."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return np.where(one == other, 0.0, np.where(np.isnan(gaps), np.inf, gaps))


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
