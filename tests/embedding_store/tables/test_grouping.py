import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import Coalescer, Grouping, Indexer, coalesce, coalesce_many, unique_ids
from elastable.embedding_store.errors import BadGradient, BadIds
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.tables import grouping
from elastable.embedding_store.tables.grouping import sum_by_position
from tests.embedding_store.tables.allocations import least_peak

ids_lists = st.lists(st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1, 2**32])), max_size=60)


def left_fold(parts: list[tuple[np.ndarray, np.ndarray, float]]) -> dict[int, np.ndarray]:
    total: dict[int, np.ndarray] = {}
    for ids, gradients, scale in parts:
        for one, gradient in zip(ids.tolist(), gradients, strict=True):
            scaled = gradient * np.float32(scale)
            total[one] = total[one] + scaled if one in total else scaled
    return total


@given(st.lists(st.tuples(ids_lists, st.floats(-2, 2, width=32)), min_size=1, max_size=4), st.integers(1, 5))
def test_sum_is_the_left_fold_to_the_bit(pushes: list[tuple[list[int], float]], dim: int) -> None:
    random = np.random.default_rng(0)
    parts = [
        (np.array(values, np.int64), random.normal(size=(len(values), dim)).astype(np.float32), scale)
        for values, scale in pushes
    ]
    expected = left_fold(parts)
    found = coalesce_many(parts)
    assert found.ids.tolist() == list(expected)
    assert found.gradients.tobytes() == b"".join(row.tobytes() for row in expected.values())


@pytest.mark.parametrize(("distinct_first", "spread"), [(0, 2**40), (5_000, 1), (40_000, 2**40)])
def test_one_thread_groups_while_another_one_sums(distinct_first: int, spread: int) -> None:
    random = np.random.default_rng(distinct_first)
    ids = np.concatenate([random.permutation(distinct_first), random.integers(0, 30_000, 40_000 - distinct_first)])
    gradients = random.normal(size=(40_000, 7)).astype(np.float32)
    pool, coalescer = RangePool(2), Coalescer()
    try:
        for scale in (1.0, 1 / 3, 1.0):
            one = coalesce_many([(ids * spread, gradients, scale)])
            beside = coalescer.coalesce_many([(ids * spread, gradients, scale)], pool)
            np.testing.assert_array_equal(beside.ids, one.ids)
            assert beside.gradients.tobytes() == one.gradients.tobytes()
            expected = left_fold([(ids * spread, gradients, scale)])
            assert beside.ids.tolist() == list(expected)
            np.testing.assert_array_equal(beside.gradients, np.stack(list(expected.values())))
            assert (beside.gradients is gradients) is (distinct_first == 40_000 and scale == 1.0)
    finally:
        pool.close()
    np.testing.assert_array_equal(
        coalescer.coalesce_many([(ids, gradients, 1.0)], pool).ids, coalesce(ids, gradients).ids
    )


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (np.ones((3, 2), np.float64), "part 0.*float64"),
        (np.ones((2, 2), np.float32), r"float32 \[3, dim\]"),
        (np.ones(3, np.float32), r"got float32 \[3\]"),
    ],
)
def test_gradients_that_do_not_fit_their_ids(gradients: np.ndarray, message: str) -> None:
    with pytest.raises(BadGradient, match=message):
        coalesce(np.arange(3), gradients)


def test_pushes_of_different_dims() -> None:
    ids = np.arange(1)
    with pytest.raises(BadGradient, match="part 1 have dim 3, those of part 0 2"):
        coalesce_many([(ids, np.ones((1, 2), np.float32), 1.0), (ids, np.ones((1, 3), np.float32), 1.0)])
    with pytest.raises(BadGradient, match="at least one part"):
        coalesce_many([])


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 5))
def test_sums_by_position_are_those_of_coalesce(values: list[int], dim: int) -> None:
    positions = np.array(values, np.int32)
    gradients = np.random.default_rng(len(values)).normal(size=(len(values), dim)).astype(np.float32)
    ids = np.arange(13)
    present, sums = sum_by_position(ids, positions, gradients)
    expected = coalesce(positions.astype(np.int64), gradients)
    order = np.argsort(expected.ids)
    np.testing.assert_array_equal(present, expected.ids[order])
    np.testing.assert_array_equal(sums, expected.gradients[order])


def test_threads_share_sums_by_position_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(5)
    ids, positions = drawn.permutation(3_000), drawn.integers(0, 2_999, 20_000).astype(np.int32)
    gradients = drawn.normal(size=(20_000, 8)).astype(np.float32)
    alone = sum_by_position(ids, positions, gradients)
    pool = RangePool(5)
    monkeypatch.setattr(grouping, "_SUMS_A_THREAD", 64)
    monkeypatch.setattr(grouping, "shared_pool", lambda: pool)
    present, sums = sum_by_position(ids, positions, gradients)
    assert np.array_equal(present, alone[0])
    assert np.array_equal(sums, alone[1])
    positions[-1] = 3_000
    with pytest.raises(BadGradient, match="0 <= position < 3000"):
        sum_by_position(ids, positions, gradients)


@pytest.mark.parametrize("position", [-1, 3, 2**31 - 1])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(BadGradient, match="0 <= position < 3"):
        sum_by_position(np.arange(3), np.array([0, position], np.int32), np.ones((2, 2), np.float32))


@pytest.mark.parametrize("gradients", [np.ones((1, 2), np.float32), np.ones((2, 2)), np.ones(2, np.float32)])
def test_gradients_that_do_not_fit_their_positions_are_refused(gradients: np.ndarray) -> None:
    with pytest.raises(BadGradient, match=r"float32 \[2, dim\]"):
        sum_by_position(np.arange(3), np.zeros(2, np.int32), gradients)


def test_ids_that_stand_once_keep_their_gradients_to_the_bit() -> None:
    ids, gradients = np.array([7, -3, 5]), np.array([[-0.0, 1.5], [2.5, np.inf], [3.5, 1e-45]], np.float32)
    update = coalesce(ids, gradients)
    assert update.ids.tolist() == [7, -3, 5]
    assert update.gradients.tobytes() == gradients.tobytes()
    strided = np.repeat(gradients, 2, axis=0)[::2]
    assert coalesce(ids, strided).gradients.flags.c_contiguous


@given(st.lists(ids_lists, max_size=4), st.integers(1, 5))
def test_one_coalescer_for_batch_after_batch(batches: list[list[int]], dim: int) -> None:
    coalescer = Coalescer()
    for values in batches:
        ids = np.array(values, np.int64)
        gradients = np.random.default_rng(len(values)).normal(size=(len(values), dim)).astype(np.float32)
        found, expected = coalescer.coalesce_many([(ids, gradients, 1.0)]), coalesce(ids, gradients)
        assert found.ids.tobytes() == expected.ids.tobytes()
        assert found.gradients.tobytes() == expected.gradients.tobytes()


@pytest.mark.parametrize("what", ["sums", "groups"])
def test_a_loop_allocates_nothing(what: str) -> None:
    random = np.random.default_rng(0)
    batches = [random.integers(0, 9000, random.integers(19_000, 20_000)) for _ in range(8)]
    gradients = random.normal(size=(20_000, 16)).astype(np.float32)
    coalescer, indexer = Coalescer(), Indexer()

    def work() -> None:
        for ids in batches:
            if what == "sums":
                coalescer.coalesce_many([(ids, gradients[: len(ids)], 1.0)])
            else:
                indexer.group(ids)

    work()
    assert least_peak(work) < 16_384


def check(found: Grouping, values: list[int]) -> None:
    assert found.ids.tolist() == list(dict.fromkeys(values))
    np.testing.assert_array_equal(found.ids[found.inverse], values)
    assert (found.offsets[0], found.offsets[-1]) == (0, len(values))
    for k, one in enumerate(found.ids.tolist()):
        group = found.positions[found.offsets[k] : found.offsets[k + 1]]
        assert group.tolist() == [i for i, value in enumerate(values) if value == one]
    dtypes = [array.dtype.name for array in (found.inverse, found.positions, found.offsets)]
    assert dtypes == ["int32", "int64", "int64"]


@given(st.lists(ids_lists, max_size=5))
def test_any_ids_batch_after_batch(batches: list[list[int]]) -> None:
    indexer = Indexer()
    for values in batches:
        check(indexer.group(np.array(values, np.int64)), values)
        unique, inverse = indexer.unique(np.array(values, np.int64))
        np.testing.assert_array_equal(unique[inverse], values)


def test_what_unique_ids_returns_stays() -> None:
    first = unique_ids(np.array([5, 5, 6]))
    unique_ids(np.array([1, 2, 3]))
    assert (first[0].tolist(), first[1].tolist()) == ([5, 6], [0, 0, 1])


@pytest.mark.parametrize("ids", [np.zeros(3, np.int32), np.arange(3, dtype=np.uint64), np.zeros((3, 2), np.int64), [1]])
def test_ids_of_another_kind_are_refused(ids: np.ndarray) -> None:
    def summed(ids: np.ndarray) -> object:
        return coalesce(ids, np.ones((len(ids), 2), np.float32))

    for group in (Indexer().group, Indexer().unique, Indexer().all_different, summed):
        with pytest.raises(BadIds, match=r"int64 \[n\], got"):
            group(ids)


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
