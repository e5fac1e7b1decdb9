"""Dense gradients and variables in slices: put together they are what was cut, and sums are those of one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import (
    BadGradient,
    BadInput,
    FutureVersion,
    JobFailed,
    NotFinite,
    NotReady,
    StaleVersion,
    StoreFailed,
)
from elastable.embedding_store.shards.row_pushes import DenseSlice, RowPush, RowPushOutcome, RowSums, SumTerm
from elastable.embedding_store.shards.sums.dense_slices import cut, joined, layout_of_servers, weighted_sum
from elastable.embedding_store.wire.pushes.dense_messages import (
    dense_sums_from_frames,
    dense_values_frames,
    dense_values_from_frames,
)
from tests.embedding_store.shards.served_shards import served

DTYPES = [np.dtype(name) for name in ("float16", "float32", "float64")]
LAYOUT = {0: DenseSlice(DTYPES[1], 6, "kernel"), 1: DenseSlice(DTYPES[0], 3, "bias"), 2: DenseSlice(DTYPES[2], 1, "s")}


def values(seed: int = 0) -> dict[int, Array]:
    random = np.random.default_rng(seed)
    shapes = {0: (2, 3), 1: (3,), 2: ()}
    return {place: np.asarray(random.standard_normal(shapes[place]), of.dtype) for place, of in LAYOUT.items()}


def push(number: int, dense: dict[int, Array] | None = None, version: int = 0) -> RowPush:
    return RowPush("j", version, number, ({}, {}), dense=(values(number) if dense is None else dense, {}))


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=6),
    st.integers(1, 9),
)
def test_what_is_cut_is_joined_again(variables: list[tuple[np.dtype[np.generic], int]], servers: int) -> None:
    layout = {place: DenseSlice(dtype, size) for place, (dtype, size) in enumerate(variables)}
    whole = {place: np.arange(each.size).astype(each.dtype) for place, each in layout.items()}
    slices, of_servers = cut(whole, layout, servers), layout_of_servers(layout, servers)
    assert [{p: DenseSlice(a.dtype, a.size) for p, a in one.items()} for one in slices] == of_servers
    sizes = [sum(each.size for each in one.values()) for one in of_servers]
    assert max(sizes) - min(sizes) <= 1
    again = joined(slices, layout)
    assert again.keys() == whole.keys()
    for place, array in whole.items():
        assert again[place].dtype == array.dtype
        np.testing.assert_array_equal(again[place], array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 1000, (1 << 14) - 1, (1 << 14) + 1, 3 << 14])
def test_a_sum_is_a_left_fold_to_the_bit(dtype: np.dtype[np.generic], size: int) -> None:
    random = np.random.default_rng(size)
    parts = [(random.standard_normal(size).astype(dtype), share) for share in (1 / 3, 0.5, 1.0, 1 / 7)]
    wide = np.result_type(dtype, np.float32)
    total = np.zeros(size, wide)
    for number, (part, share) in enumerate(parts):
        weighted = part.astype(wide) * wide.type(share)
        total = total + weighted if number else weighted
    made = weighted_sum(parts)
    assert made.dtype == dtype
    assert made.tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("servers", [1, 3, 11])
def test_servers_sum_and_keep_slices(servers: int) -> None:
    sums = RowSums(0, (SumTerm(1, 0, 0.25), SumTerm(0, 0, 0.75)))
    with served(servers) as (_, store):
        store.begin_job("j", False, LAYOUT)
        assert [store.push_rows(push(number)) for number in (0, 1, 0)] == [
            RowPushOutcome.ACCEPTED, RowPushOutcome.ACCEPTED, RowPushOutcome.DUPLICATE,
        ]  # fmt: skip
        made = store.sum_dense(sums, LAYOUT, squares=True)
        assert (made.missing, made.squares) == ((), {})
        for place in LAYOUT:
            expected = weighted_sum([(values(1)[place].reshape(-1), 0.25), (values(0)[place].reshape(-1), 0.75)])
            assert made.dense[place].tobytes() == expected.tobytes()
        assert store.sum_dense(RowSums(0, (SumTerm(7, 0, 1.0),)), LAYOUT, squares=False).missing == (7,)
        with pytest.raises(FutureVersion, match="here are those of none"):
            store.read_dense("j", 0, LAYOUT)
        store.keep_dense(5, values(), LAYOUT)
        kept = store.read_dense("j", 5, LAYOUT)
        assert {place: array.tobytes() for place, array in kept.items()} == {
            place: array.tobytes() for place, array in values().items()
        }
        with pytest.raises(StaleVersion, match="of version 4; here are those of 5"):
            store.read_dense("j", 4, LAYOUT)
        with pytest.raises(JobFailed, match="dense variables of job k are not here"):
            store.read_dense("k", 5, LAYOUT)


def test_what_does_not_fit_is_refused_by_name() -> None:
    wrong = {**values(), 0: np.zeros(6, np.float64)}
    infinite = {**values(), 1: np.array([0, np.inf, 0], np.float16)}
    with served(2) as (servers, store):
        with pytest.raises(NotReady, match="no job has claimed"):
            servers[0].shard.read_dense("j", 0)
        store.begin_job("j", False, LAYOUT)
        with pytest.raises(BadGradient, match=r"dense gradient of variable 0: got float64 \[5\]; want 5 of float32"):
            store.push_rows(push(0, wrong))
        with pytest.raises(NotFinite, match="gradient of variable 'bias' holds NaN or Inf"):
            store.push_rows(push(0, infinite))
        with pytest.raises(BadGradient, match=r"a push of 2 parts has dense gradients for 0.*holds slices of \[0\]"):
            servers[0].shard.push_rows(RowPush("j", 0, 9, ({}, {})))
        with pytest.raises(BadGradient, match="dense values of variable 9"):
            store.keep_dense(1, {9: np.zeros(1, np.float32)}, LAYOUT)
        assert store.shard_status().pushed_bytes <= 2 << 10  # the other server has its slice of the infinite gradient
        store.begin_job("j", True, LAYOUT)
        assert store.push_rows(push(1, infinite)) is RowPushOutcome.ACCEPTED
        store.begin_job("j", False)
        with pytest.raises(BadGradient, match=r"the store server holds slices of \[\]"):
            store.push_rows(push(0))
        assert store.push_rows(RowPush("j", 0, 4, ({},))) is RowPushOutcome.ACCEPTED
        assert servers[0].shard.sum_dense(RowSums(0, (SumTerm(4, 0, 1.0),)), squares=False).dense == {}
        with pytest.raises(StoreFailed, match=r"slices of dense variables \{\}; want \{0:"):
            store.sum_dense(RowSums(0, (SumTerm(4, 0, 1.0),)), LAYOUT, squares=False)


def test_slices_count_as_memory_of_pushes() -> None:
    layout = {0: DenseSlice(DTYPES[1], 20_000, "kernel")}
    large = {0: np.ones(20_000, np.float32)}
    with served(1, most_bytes=100_000) as (_, store):
        store.begin_job("j", False, layout)
        store.push_rows(push(0, large))
        assert 80_000 < store.shard_status().pushed_bytes < 90_000
        with pytest.raises(NotReady, match="more are above its limit of 100,000"):
            store.push_rows(push(1, large))
        store.keep_dense(1, large, layout)
        assert 160_000 < store.shard_status().pushed_bytes < 170_000


def test_a_server_that_was_started_again_has_no_variables_and_lacks_pushes() -> None:
    with served(2) as (servers, store):
        store.begin_job("j", False, LAYOUT)
        store.push_rows(push(0))
        store.keep_dense(0, values(), LAYOUT)
        servers[1].stop()
        servers[1].start()
        with pytest.raises(NotReady, match="no job has claimed"):
            store.read_dense("j", 0, LAYOUT)
        assert store.sum_dense(RowSums(0, (SumTerm(0, 0, 1.0),)), LAYOUT, squares=False).missing == (0,)
        with pytest.raises(FutureVersion):  # claimed again by the sum
            store.read_dense("j", 0, LAYOUT)
        store.keep_dense(0, values(), LAYOUT)
        assert store.read_dense("j", 0, LAYOUT)[2] == values()[2]


def test_answers_other_than_asked_for_are_refused_before_anything_is_allocated() -> None:
    frames = list(dense_values_frames(3, {0: np.zeros(6, np.float32)}))
    assert dense_values_from_frames(frames)[0] == 3
    with pytest.raises(BadInput, match="want"):
        dense_values_from_frames(frames, LAYOUT)
    with pytest.raises(BadInput, match="slices of dense variables"):
        dense_sums_from_frames(dense_values_frames(0, {}), LAYOUT)
    with served(1) as (servers, store):
        store.begin_job("j", False, LAYOUT)
        store.keep_dense(1, values(), LAYOUT)
        with pytest.raises(StoreFailed, match="sent a malformed answer"):
            store.read_dense("j", 1, {0: LAYOUT[0]})
        assert servers[0].shard.read_dense("j", 1).keys() == LAYOUT.keys()
