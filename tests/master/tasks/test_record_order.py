"""The order of records: a permutation that depends on nothing but its arguments."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.master.tasks.record_order import record_order

pytestmark = pytest.mark.process

blocks = st.one_of(st.none(), st.integers(1, 40))


@given(st.integers(0, 300), st.integers(0, 3), st.integers(-(2**63), 2**63 - 1), st.booleans(), blocks)
def test_every_record_once_however_it_is_cut(
    records: int, epoch: int, seed: int, shuffle: bool, block: int | None
) -> None:
    order = record_order(records, epoch, seed, shuffle, block)
    whole = order.take(0, records)
    assert whole.dtype == np.int64
    assert sorted(whole.tolist()) == list(range(records))
    cuts = [*range(0, records, 7), records]
    pieces = [order.take(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert np.concatenate([np.empty(0, np.int64), *pieces]).tolist() == whole.tolist()
    if not shuffle:
        assert whole.tolist() == list(range(records))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(record_order(50, epoch, seed, True, block).take(0, 50))
        for epoch in range(3)
        for seed in (0, 1, -1)
        for block in (None, 8)
    }
    assert len(orders) == 18


def test_blocks_stay_together() -> None:
    positions = record_order(100, 0, 5, True, 10).take(0, 100)
    blocks = (positions // 10).reshape(10, 10)
    assert (blocks == blocks[:, :1]).all()
    assert not np.array_equal(positions, np.sort(positions))


def test_another_process_sees_the_same_order() -> None:
    module = "elastable.master.tasks.record_order"
    code = f"from {module} import record_order as r; print(r(40, 2, 9, True, {{}}).take(3, 33).tolist())"
    for block in (None, 7):
        told = subprocess.run(
            [sys.executable, "-c", code.format(block)], check=True, capture_output=True, text=True, timeout=60
        )
        assert told.stdout.strip() == str(record_order(40, 2, 9, True, block).take(3, 33).tolist())


def test_the_order_is_pinned() -> None:
    """A change of these numbers would silently change what every resumed job trains on."""
    assert record_order(8, 0, 0, True, None).take(0, 8).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
@pytest.mark.parametrize("arguments", [(True, None), (True, 3), (False, None)])
def test_positions_outside_are_refused(start: int, stop: int, arguments: tuple[bool, int | None]) -> None:
    with pytest.raises(BadInput, match="do not lie within 10 records"):
        record_order(10, 0, 0, *arguments).take(start, stop)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BadInput, match="block must be"):
        record_order(10, 0, 0, True, 0)
    with pytest.raises(BadInput, match="must not be negative"):
        record_order(-1, 0, 0, True, None)
