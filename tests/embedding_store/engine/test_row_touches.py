"""Which rows an eviction takes, against a sorted list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import EvictionSpec
from elastable.embedding_store.engine.eviction import RowTouches

EXTREME = st.sampled_from([-(2**63), -(2**63) + 1, -1, 0, 2**63 - 1])


def evicted(eviction: EvictionSpec, version: int, touches: list[tuple[int, int]], ids: list[int]) -> set[int]:
    kept = RowTouches(eviction, len(ids))
    kept.write(np.arange(len(ids)), np.array(touches, np.int64).reshape(-1, 2))
    gone = list[int]()

    def remove(some: Int64) -> int:
        gone.extend(some.tolist())
        return len(some)

    assert kept.evict(version, np.array(ids, np.int64), len(ids), remove) == len(gone) == len(set(gone))
    return set(gone)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_budget_keeps_those_touched_last_and_of_equal_ones_the_smaller_ids(data: st.DataObject) -> None:
    ids = data.draw(st.lists(EXTREME | st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30))
    newest = data.draw(st.sampled_from([3, 2**12, 2**61]))
    versions = [data.draw(st.integers(0, newest)) for _ in ids]
    budget = data.draw(st.integers(1, 12))
    order = sorted(zip(versions, ids, strict=True), key=lambda row: (-row[0], row[1]))
    touches = [(version, 0) for version in versions]
    assert evicted(EvictionSpec(max_rows=budget), newest, touches, ids) == {one for _, one in order[budget:]}


@pytest.mark.parametrize("rows", [4095, 4096, 4097, 12_289])
def test_more_rows_than_go_at_a_time(rows: int) -> None:
    ids = list(range(rows))
    assert evicted(EvictionSpec(max_age=1), 9, [(1, 0)] * rows, ids) == set(ids)
    assert evicted(EvictionSpec(max_rows=7), 9, [(1, 0)] * rows, ids) == set(ids[7:])
