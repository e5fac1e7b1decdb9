"""Which checkpoints stay: whole ones are counted, and what they build upon stays with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.master.checkpoints.writing import StoredCheckpoint, to_remove


def name(version: int, again: int = 1) -> str:
    return f"ckpt-{version:010d}" + (f"-{again}" if again > 1 else "")


def chain(*versions: int, job: str = "j") -> StoredCheckpoint:
    return StoredCheckpoint(name(versions[0]), tuple(map(name, versions)), job)


def left(standing: Sequence[StoredCheckpoint], written: str, keep: int) -> list[str]:
    gone = to_remove(standing, written, keep)
    return [one.name for one in standing if one.name not in gone]


FIVE = [chain(1), chain(2, 1), chain(3, 2, 1), chain(4), chain(5, 4)]


@pytest.mark.parametrize(
    ("keep", "stay"), [(0, [1, 2, 3, 4, 5]), (1, [4, 5]), (2, [4, 5]), (3, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_bases_stay_as_long_as_they_are_needed(keep: int, stay: list[int]) -> None:
    assert left(FIVE, name(5), keep) == list(map(name, stay))


def test_damaged_ones_are_not_counted_and_left_alone() -> None:
    standing = [chain(1), chain(2), StoredCheckpoint(name(3)), chain(4)]
    assert left(standing, name(4), 2) == [name(2), name(3), name(4)]


def test_those_of_other_jobs_are_left_alone() -> None:
    standing = [chain(1), chain(2), chain(7, job="other"), chain(8, 7, job="other")]
    assert left(standing, name(2), 1) == [name(2), name(7), name(8)]


def test_one_of_the_same_version_takes_the_place_of_the_older() -> None:
    again = StoredCheckpoint(name(2, 2), (name(2, 2), name(1)), "j")
    standing = [chain(1), chain(2, 1), again]
    assert left(standing, again.name, 0) == [name(1), again.name]
    needed = StoredCheckpoint(name(2, 2), (name(2, 2), name(2), name(1)), "j")
    assert left([chain(1), chain(2, 1), needed], needed.name, 1) == [name(1), name(2), needed.name]


def test_the_last_one_written_stays_where_newer_versions_are_there() -> None:
    standing = [chain(1), chain(2, 1), chain(8), chain(9)]
    assert left(standing, name(2), 1) == [name(1), name(2), name(9)]


@given(builds=st.lists(st.booleans(), min_size=1, max_size=12), keep=st.integers(0, 5))
def test_what_stays_can_be_restored_also_while_others_go(builds: list[bool], keep: int) -> None:
    chains: list[tuple[str, ...]] = []
    for version, increment in enumerate(builds):
        chains.append((name(version), *(chains[-1] if increment and chains else ())))
    standing = [StoredCheckpoint(names[0], names, "j") for names in chains]
    there = {one.name for one in standing}
    for gone in to_remove(standing, name(len(builds) - 1), keep):
        there.remove(gone)
        assert all(set(one.chain) <= there for one in standing if one.name in there)
    newest = [one.name for one in standing][-keep:]
    assert set(newest) <= there
