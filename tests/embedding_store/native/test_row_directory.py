"""Both directories against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.row_directory import DirectRows, RowDirectory


def find(directory: RowDirectory, ids: np.ndarray) -> tuple[list[int], int]:
    positions = np.empty(len(ids), np.int64)
    missing = directory.find(ids, positions)
    return positions.tolist(), missing


def claim(directory: RowDirectory, ids: np.ndarray) -> tuple[list[int], list[int]]:
    positions = np.empty(len(ids), np.int64)
    directory.reserve(len(ids))
    assert directory.capacity >= directory.count + len(np.unique(ids)) or isinstance(directory, DirectRows)
    fresh = directory.claim(ids, positions)
    return positions.tolist(), fresh.tolist()


def everything(directory: RowDirectory, limit: int) -> list[tuple[int, int]]:
    found, cursor = list[tuple[int, int]](), 0
    while True:
        ids, positions, cursor = directory.scan(cursor, limit)
        if not len(ids):
            return found
        assert len(ids) <= limit
        found += zip(ids.tolist(), positions.tolist(), strict=True)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_direct_rows(size: int) -> None:
    directory = DirectRows(size)
    random = np.random.default_rng(size)
    live: set[int] = set()
    for _ in range(4):
        ids = random.integers(0, size, 1 + size // 3)
        positions, fresh = claim(directory, ids)
        assert positions == ids.tolist()
        assert set(ids[fresh].tolist()) == set(ids.tolist()) - live
        live |= set(ids.tolist())
        assert directory.count == len(live)
        whole = np.arange(size)
        expected = [one if one in live else -1 for one in range(size)]
        assert find(directory, whole) == (expected, size - len(live))
        assert everything(directory, 7) == [(one, one) for one in sorted(live)]
    directory.clear()
    assert (directory.count, everything(directory, 5)) == (0, [])


def test_id_index_while_it_grows() -> None:
    directory = IdIndex()
    random = np.random.default_rng(0)
    known: dict[int, int] = {}
    for _ in range(6):
        # Neighbours, and ids that differ in high bits alone.
        ids = np.concatenate([random.integers(-3000, 3000, 2000), random.integers(0, 2**20, 2000) << 43])
        positions, fresh = claim(directory, ids)
        expected_fresh = []
        for i, one in enumerate(ids.tolist()):
            if one not in known:
                known[one] = len(known)
                expected_fresh.append(i)
        assert (positions, fresh) == ([known[one] for one in ids.tolist()], expected_fresh)
        assert directory.count == len(known)
    others = np.array([2**63 - 1, -(2**63), 1 << 42])
    assert find(directory, others) == ([-1] * 3, 3)
    assert everything(directory, 999) == list(known.items())
    directory.clear()
    assert find(directory, np.array(list(known))) == ([-1] * len(known), len(known))


def test_no_ids() -> None:
    nothing = np.empty(0, np.int64)
    for directory in (IdIndex(), DirectRows(5)):
        assert find(directory, nothing) == ([], 0)
        assert claim(directory, nothing) == ([], [])
