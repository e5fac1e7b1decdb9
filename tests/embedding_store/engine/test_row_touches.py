"""Which rows an eviction takes, against a sorted list."""

from __future__ import annotations

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


def test_age_and_frequency() -> None:
    touches, ids = [(10, 1), (7, 5), (6, 5), (10, 2), (0, 9)], [3, 1, 4, -1, 5]
    assert evicted(EvictionSpec(max_age=3), 10, touches, ids) == {4, 5}
    assert evicted(EvictionSpec(max_age=10), 10, touches, ids) == set()
    assert evicted(EvictionSpec(min_frequency=2), 10, touches, ids) == {3}
    assert evicted(EvictionSpec(max_age=3, min_frequency=2, max_rows=1), 10, touches, ids) == {4, 5, 3, 1}
    assert evicted(EvictionSpec(max_age=3, every=4), 10, touches, ids) == set()
    assert evicted(EvictionSpec(max_age=3, every=5), 10, touches, ids) == {4, 5}


@pytest.mark.parametrize("rows", [4095, 4096, 4097, 12_289])
def test_more_rows_than_go_at_a_time(rows: int) -> None:
    ids = list(range(rows))
    assert evicted(EvictionSpec(max_age=1), 9, [(1, 0)] * rows, ids) == set(ids)
    assert evicted(EvictionSpec(max_rows=7), 9, [(1, 0)] * rows, ids) == set(ids[7:])


def test_rows_put_without_a_version_have_the_next_reported_one() -> None:
    kept = RowTouches(EvictionSpec(max_age=1), 4)
    kept.write(np.arange(2), None)
    kept.write(np.arange(2, 4), np.array([[3, 0], [4, 0]]))
    copy = RowTouches(EvictionSpec(max_age=1), 4)
    copy.write(np.arange(4), kept.read(np.arange(4)))
    for each in (kept, copy):
        each.settle(120, 4)
        each.settle(130, 4)
        assert each.read(np.arange(4))[:, 0].tolist() == [120, 120, 3, 4]
