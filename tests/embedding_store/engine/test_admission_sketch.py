"""The admission sketch: never too few, seldom too many, the same in every process."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store import AdmissionSpec, BadInput, TableSpec
from elastable.embedding_store.engine.membership import AdmissionSketch


def sketch(counters: int, sightings: int = 3, seed: int = 0, name: str = "t") -> AdmissionSketch:
    return AdmissionSketch(TableSpec(name, 1, seed=seed), AdmissionSpec(sightings, counters))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20, unique=True), max_size=20))
def test_nobody_is_admitted_late(commits: list[list[int]]) -> None:
    counted, seen = sketch(16), dict[int, int]()
    for ids in commits:
        batch = np.array(ids, np.int64)
        admitted = counted.admits(batch)
        for one, comes in zip(ids, admitted.tolist(), strict=True):
            assert comes or seen.get(one, 0) + 1 < 3
            seen[one] = seen.get(one, 0) + 1
        counted.count(batch)


def test_hardly_anybody_is_admitted_early_where_there_is_room() -> None:
    counted = sketch(1 << 16)
    once, twice = np.arange(5000) * 7919, -np.arange(1, 1001)
    counted.count(once)
    counted.count(twice)
    counted.count(twice)
    assert counted.admits(twice).all()
    assert np.count_nonzero(counted.admits(once)) <= 5
    assert not counted.admits(np.arange(10**9, 10**9 + 1000)).any()


def test_counters_stop_at_255() -> None:
    counted, one = sketch(16, sightings=255), np.array([5], np.int64)
    for number in range(1, 300):
        assert bool(counted.admits(one)[0]) == (number >= 255)
        counted.count(one)
    assert counted.read().max() == 255


def test_the_sketch_is_of_its_table_and_seed() -> None:
    ids = np.arange(300)
    first, again, other, seeded = sketch(1 << 10), sketch(1 << 10), sketch(1 << 10, name="u"), sketch(1 << 10, seed=1)
    for each in (first, again, other, seeded):
        each.count(ids)
    assert (first.read() == again.read()).all()
    assert (first.read() != other.read()).any()
    assert (first.read() != seeded.read()).any()


def test_counters_are_rounded_up_and_restored() -> None:
    counted, copy = sketch(1000), sketch(1000)
    assert counted.bytes == 1024
    counted.count(np.arange(100))
    copy.write(counted.read())
    assert (copy.read() == counted.read()).all()
    for bad in (np.zeros(1000, np.uint8), np.zeros(1024, np.int64), [0] * 1024):
        with pytest.raises(BadInput, match=r"'t'.*uint8 \[1024\]"):
            copy.require(bad)  # type: ignore[arg-type]
    assert (copy.read() == counted.read()).all()
