"""The elementwise balanced split: numpy.array_split, padded to equal buffers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.replicas.training.sharded_variables import VariableSplit

COUNTS = st.integers(1, 200)
PARTS = st.integers(1, 24)


def test_thirty_elements_over_four_replicas() -> None:
    # ORACLES "Tensor locations (PopART)": two of 8 and two of 7 plus one pad, each buffer of length 8.
    split = VariableSplit(30, 4)
    assert split.length == 8
    assert [split.bounds(part) for part in range(4)] == [(0, 8), (8, 16), (16, 23), (23, 30)]
    tensor = np.arange(1, 31, dtype=np.float32).reshape(5, 6)
    buffers = np.stack([split.take(part, tensor) for part in range(4)])
    assert buffers.shape == (4, 8)
    assert (buffers == 0).sum(axis=1).tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(split.join(buffers), np.arange(1, 31))


@given(COUNTS, PARTS)
def test_parts_are_those_of_array_split(elements: int, parts: int) -> None:
    split, tensor = VariableSplit(elements, parts), np.arange(1, elements + 1)
    assert split.length == -(-elements // parts)
    for part, expected in enumerate(np.array_split(tensor, parts)):
        first, last = split.bounds(part)
        np.testing.assert_array_equal(tensor[first:last], expected)
        buffer = split.take(part, tensor)
        np.testing.assert_array_equal(buffer[: len(expected)], expected)
        assert not buffer[len(expected) :].any()


@given(COUNTS, PARTS, st.integers(0, 3))
def test_put_is_take_of_every_part_and_join_undoes_both(elements: int, parts: int, more: int) -> None:
    split, tensor = VariableSplit(elements, parts), np.arange(1.0, elements + 1)
    rows = np.full((parts, split.length + more), -1.0)
    split.put(tensor, rows)
    np.testing.assert_array_equal(
        rows[:, : split.length], np.stack([split.take(part, tensor) for part in range(parts)])
    )
    assert (rows[:, split.length :] == -1).all()
    np.testing.assert_array_equal(split.join(rows[:, : split.length]), tensor)


def test_empty_splits_and_missing_parts_are_refused() -> None:
    for elements, parts in ((0, 1), (1, 0), (-1, 2)):
        with pytest.raises(BadInput, match="must be at least 1"):
            VariableSplit(elements, parts)
    with pytest.raises(BadInput, match=r"no part 4; the parts are 0 to 3"):
        VariableSplit(30, 4).bounds(4)
