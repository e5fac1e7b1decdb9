import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import BadIds, Grouping, Indexer, group_ids, unique_ids
from tests.embedding_store.tables.allocations import least_peak

ids_lists = st.lists(st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1, 2**32])), max_size=60)


def check(found: Grouping, values: list[int]) -> None:
    assert found.ids.tolist() == list(dict.fromkeys(values))
    np.testing.assert_array_equal(found.ids[found.inverse], values)
    assert (found.offsets[0], found.offsets[-1]) == (0, len(values))
    for k, one in enumerate(found.ids.tolist()):
        group = found.positions[found.offsets[k] : found.offsets[k + 1]]
        assert group.tolist() == [i for i, value in enumerate(values) if value == one]
    dtypes = [array.dtype.name for array in (found.inverse, found.positions, found.offsets)]
    assert dtypes == ["int32", "int64", "int64"]


def test_example_of_embedding_tables_jl() -> None:
    # Source: the tests of EmbeddingTables.jl (its Indexer), offsets and positions counted from 0.
    found = Indexer().group(np.array([10, 4, 10, 100, 4, 4, 4, 1, 9, 10, 5]))
    assert found.ids.tolist() == [10, 4, 100, 1, 9, 5]
    assert found.offsets.tolist() == [0, 3, 7, 8, 9, 10, 11]
    assert found.positions.tolist() == [0, 2, 9, 1, 4, 5, 6, 3, 7, 8, 10]


@given(ids_lists)
def test_any_ids(values: list[int]) -> None:
    check(group_ids(np.array(values, np.int64)), values)


@given(st.lists(ids_lists, max_size=5))
def test_one_indexer_for_batch_after_batch(batches: list[list[int]]) -> None:
    indexer = Indexer()
    for values in batches:
        check(indexer.group(np.array(values, np.int64)), values)
        unique, inverse = indexer.unique(np.array(values, np.int64))
        np.testing.assert_array_equal(unique[inverse], values)


@pytest.mark.parametrize("shift", [0, 7, 20, 31, 40, 51])
def test_ids_that_share_bits(shift: int) -> None:
    ids = np.concatenate([np.arange(2000) << shift, -(np.arange(2000) << shift), np.arange(2000)])
    unique, inverse = unique_ids(ids)
    np.testing.assert_array_equal(unique[inverse], ids)
    assert len(unique) == len(set(ids.tolist()))


def test_ids_need_not_be_contiguous() -> None:
    ids = np.arange(20)[::2]
    np.testing.assert_array_equal(unique_ids(ids)[0], ids)


def test_what_unique_ids_returns_stays() -> None:
    first = unique_ids(np.array([5, 5, 6]))
    unique_ids(np.array([1, 2, 3]))
    assert (first[0].tolist(), first[1].tolist()) == ([5, 6], [0, 0, 1])


@pytest.mark.parametrize("ids", [np.zeros(3, np.int32), np.zeros((2, 2), np.int64), [1, 2]])
def test_ids_of_another_kind_are_refused(ids: np.ndarray) -> None:
    for group in (Indexer().group, Indexer().unique, Indexer().all_different):
        with pytest.raises(BadIds, match=r"int64 \[n\], got"):
            group(ids)


def test_a_loop_allocates_nothing() -> None:
    random = np.random.default_rng(0)
    batches = [random.integers(0, 9000, random.integers(19_000, 20_000)) for _ in range(8)]
    indexer = Indexer()

    def group_all() -> None:
        for ids in batches:
            indexer.group(ids)

    group_all()
    assert least_peak(group_all) < 16_384


near = st.lists(st.integers(-40, 40), min_size=1, max_size=60)


@given(near, st.integers(-(2**63) + 40, 2**63 - 41))
def test_ids_that_lie_together_are_known_to_differ(values: list[int], around: int) -> None:
    indexer = Indexer()
    ids = np.array([value + around for value in values], np.int64)
    assert indexer.all_different(ids) is (len(set(values)) == len(values) and int(np.ptp(values)) < 512 * len(values))


@given(ids_lists)
def test_ids_that_repeat_are_never_taken_for_different(values: list[int]) -> None:
    known = Indexer().all_different(np.array(values, np.int64))
    assert not known or len(set(values)) == len(values)


def test_known_to_differ_up_to_the_last_bit() -> None:
    indexer, ids = Indexer(), np.random.default_rng(5).permutation(20_000)
    for last, known in ((2**23 - 1, True), (2**23, False)):
        spread = np.append(ids, last)
        assert indexer.all_different(spread) is known
        assert indexer.all_different(np.append(spread, last)) is False
    assert indexer.all_different(ids[:0]) is True
