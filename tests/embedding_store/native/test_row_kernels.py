"""Gathering and folding rows, for every length of row, wherever they are written."""

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.native.row_fold import fold_bags
from elastable.embedding_store.native.row_gather import can_stream, gather, gather_marked

DIMS = (1, 2, 3, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 64, 80, 100, 128, 129, 256, 300)
GUARD = 7.0


def outputs(count: int, dim: int) -> list[tuple[Float32, Float32]]:
    """Buffers full of GUARD, and the part that is to be written: whole, columns of a wider one, unaligned."""
    whole, wide = np.full((count, dim), GUARD, np.float32), np.full((count, dim + 8), GUARD, np.float32)
    flat = np.full(count * dim + 2, GUARD, np.float32)
    return [(whole, whole), (wide, wide[:, 4 : 4 + dim]), (flat, flat[1:-1].reshape(count, dim))]


@pytest.mark.parametrize("dim", DIMS)
def test_gather(dim: int) -> None:
    random = np.random.default_rng(dim)
    rows = random.normal(size=(100, dim)).astype(np.float32)
    positions = random.integers(0, 100, 50)
    positions[::9] = -1
    for streamed in (False, True):
        for buffer, out in outputs(50, dim):
            expected = np.full_like(buffer, GUARD)
            inside = np.ndarray(out.shape, np.float32, expected, out.ctypes.data - buffer.ctypes.data, out.strides)
            inside[positions >= 0] = rows[positions[positions >= 0]]
            gather(rows, positions, out, streamed and can_stream(out))
            np.testing.assert_array_equal(buffer, expected)
    assert can_stream(np.empty((4, 16), np.float32))


@pytest.mark.parametrize("dim", DIMS)
def test_gather_marked(dim: int) -> None:
    random = np.random.default_rng(dim)
    rows = random.normal(size=(130, dim)).astype(np.float32)
    live = random.random(130) < 0.5
    marks = np.packbits(np.pad(live, (0, 62)), bitorder="little").view(np.uint64)
    ids = random.integers(0, 130, 90)
    missing = np.empty(90, np.int64)
    for _, out in outputs(90, dim):
        count = gather_marked(rows, marks, ids, out, missing, can_stream(out))
        assert missing[:count].tolist() == np.flatnonzero(~live[ids]).tolist()
        np.testing.assert_array_equal(out[live[ids]], rows[ids[live[ids]]])
        assert (out[~live[ids]] == GUARD).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_fold_bags(dim: int, weighted: bool) -> None:
    random = np.random.default_rng(dim)
    rows = random.normal(size=(40, dim)).astype(np.float32)
    fresh = random.normal(size=(5, dim)).astype(np.float32)
    positions = random.integers(-5, 40, 60)
    offsets = np.array([0, 0, 1, 20, 20, 57, 60])
    weights = random.normal(size=60).astype(np.float32) if weighted else None
    taken = np.where((positions >= 0)[:, None], rows[positions], fresh[~positions % 5])
    folded = np.zeros((6, dim), np.float32)
    for bag in range(6):
        for i in range(offsets[bag], offsets[bag + 1]):
            folded[bag] += taken[i] if weights is None else taken[i] * weights[i]
    for first in (0, 1000):  # offsets of a part of a longer list do not begin with zero
        for buffer, out in outputs(6, dim):
            fold_bags(rows, fresh, positions, offsets + first, weights, "sum", out)
            np.testing.assert_array_equal(out, folded)
            assert (buffer == GUARD).sum() >= buffer.size - out.size


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("position", [3, -3, 2**63 - 1, -(2**63)])
def test_a_bag_without_a_row_is_reported_and_not_folded(weighted: bool, position: int) -> None:
    rows, fresh = np.ones((3, 4), np.float32), np.full((2, 4), 5, np.float32)
    positions, offsets = np.array([0, 2, -2, position, 1]), np.array([0, 3, 5])
    out = np.full((2, 4), GUARD, np.float32)
    weights = np.ones(5, np.float32) if weighted else None
    assert not fold_bags(rows, fresh, positions, offsets, weights, "sum", out)
    assert out.tolist() == [[7.0] * 4, [GUARD] * 4]
    assert fold_bags(rows, fresh, np.clip(positions, -2, 2), offsets, weights, "sum", out)


def test_what_is_outside_is_left_alone_and_counted() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    ids = np.array([2, 3, -1, 0, 2**63 - 1, -(2**63)])
    out = np.full((6, 4), GUARD, np.float32)
    assert gather(rows, ids, out, True) == 2
    np.testing.assert_array_equal(out[[0, 3]], rows[[2, 0]])
    missing = np.empty(6, np.int64)
    assert gather_marked(rows, np.array([7], np.uint64), ids, out, missing, False) == 4
    assert missing[:4].tolist() == [1, 2, 4, 5]
    assert (out[[1, 2, 4, 5]] == GUARD).all()
