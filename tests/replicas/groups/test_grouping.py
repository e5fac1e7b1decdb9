"""Groupings: PopART's own cases, and that they are partitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.group import CommGroup, ReplicaGrouping


@pytest.mark.parametrize(
    ("grouping", "transposed"),
    [((16, 1, 4), (16, 4, 4)), ((16, 4, 4), (16, 1, 4)), ((16, 2, 8), (16, 1, 2)), ((16, 1, 2), (16, 2, 8))],
)
def test_transposes(grouping: tuple[int, int, int], transposed: tuple[int, int, int]) -> None:
    """Source: PopART, `ReplicaGrouping::getTranspose`."""
    assert ReplicaGrouping(*grouping).transposed() == ReplicaGrouping(*transposed)


def test_a_transpose_that_is_not_a_grouping_is_refused() -> None:
    with pytest.raises(BadInput, match="groups of 2 at stride 3 of 12 replicas have no transpose"):
        ReplicaGrouping(12, 3, 2).transposed()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_groups_are_a_partition_and_transposed_twice_they_are_themselves(stride: int, size: int, blocks: int) -> None:
    grouping = ReplicaGrouping(stride * size * blocks, stride, size)
    members = [grouping.members(group) for group in range(grouping.groups)]
    assert sorted(rank for group in members for rank in group) == list(range(grouping.replicas))
    for rank in range(grouping.replicas):
        # Source: PopART, `ReplicaGrouping::getGroupAt`.
        group = rank % stride + stride * (rank // (stride * size))
        assert grouping.group_of(rank) == group
        assert rank in members[group]
    try:
        other = grouping.transposed()
    except BadInput:
        assert stride > 1
        assert blocks > 1
        return
    places = {tuple(group[place] for group in members) for place in range(size)}
    assert places == {other.members(group) for group in range(other.groups)}


@pytest.mark.parametrize(
    ("comm_group", "grouping"),
    [(CommGroup("all"), (8, 1, 8)), (CommGroup("consecutive", 2), (8, 1, 2)), (CommGroup("orthogonal", 2), (8, 4, 2))],
)
def test_comm_groups(comm_group: CommGroup, grouping: tuple[int, int, int]) -> None:
    assert comm_group.grouping(8) == ReplicaGrouping(*grouping)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReplicaGrouping(10, 1, 4), "10 replicas cannot be divided into groups of 4 at stride 1"),
        (lambda: ReplicaGrouping(10, 0, 5), "stride of a replica grouping must be at least 1, got 0"),
        (lambda: CommGroup("ring", 2), "comm group 'ring'"),
        (lambda: CommGroup("orthogonal"), "needs a size of at least 1"),
        (lambda: CommGroup("consecutive", 3).grouping(8), "3 does not divide 8 replicas"),
        (lambda: ReplicaGrouping(8, 1, 4).members(2), "no group 2; the groups are 0 to 1"),
        (lambda: ReplicaGrouping(8, 1, 4).group_of(8), "no replica 8; the ranks are 0 to 7"),
    ],
)
def test_invalid_arguments_are_refused(make: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()  # type: ignore[operator]
