"""The directory of fixed tables against a set."""

import numpy as np
import pytest

from elastable.embedding_store.native.row_directory import DirectRows
from tests.embedding_store.native.test_id_index import find, scanned


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_direct_rows(size: int) -> None:
    directory = DirectRows(size)
    random = np.random.default_rng(size)
    live: set[int] = set()
    for count in (0, *[1 + size // 3] * 4):
        ids = random.integers(0, size, count)
        positions = np.empty(count, np.int64)
        fresh = directory.claim(ids, positions)
        assert positions.tolist() == ids.tolist()
        assert set(ids[fresh].tolist()) == set(ids.tolist()) - live
        live |= set(ids.tolist())
        assert directory.count == len(live)
        whole = np.arange(size)
        expected = [one if one in live else -1 for one in range(size)]
        assert find(directory, whole).tolist() == expected
        assert find(directory, whole[:0]).tolist() == []
        assert scanned(directory, 7) == [(one, one) for one in sorted(live)]
    directory.clear()
    assert (directory.count, scanned(directory, 5)) == (0, [])
