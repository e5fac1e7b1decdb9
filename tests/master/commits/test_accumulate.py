"""The sum of a version's pushes: right, and the same to the bit whatever came first."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadGradient, BadInput, IdOutOfRange, NotFinite, TableNotFound
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.shards.version_sums import sum_pushes
from elastable.master import api
from elastable.master.api import Divisor, DivisorKind, GradientPart, Push, PushOutcome, SyncPushId
from elastable.master.commits.accumulate import Accumulated, WeightedPushes, add_metrics
from elastable.master.commits.push_protocol import Sequences
from elastable.master.core.job_state import JobState, Work
from elastable.master.master_options import MasterOptions
from elastable.master.push_check import Expected, TensorSpec, check_evaluation, check_finite, check_push
from elastable.master.tasks.progress import Progress
from tests.master.fakes import job_of


def f32(values: object) -> Float32:
    return np.array(values, np.float32)


def row_updates(pushes: Sequence[Push], average: str) -> dict[str, TableUpdate]:
    """As the master sums them; store servers, which are told how, come to the same."""
    weighted = WeightedPushes(pushes, average)
    found = weighted.row_updates(())
    parts = {push.id.micro_batch: [push.slices, *(part.slices for part in push.parts)] for push in pushes}
    at_servers = sum_pushes(weighted.row_sums(0, ()), parts)
    assert list(found) == list(at_servers)
    for table, update in found.items():
        assert update.ids.tobytes() == at_servers[table].ids.tobytes()
        assert update.gradients.tobytes() == at_servers[table].gradients.tobytes()
    return found


def accumulate(pushes: Sequence[Push], average: str) -> Accumulated:
    return WeightedPushes(pushes, average).accumulated()


def random_push(number: int, seed: int) -> Push:
    random = np.random.default_rng((seed, number))
    count = int(random.integers(0, 6))
    return Push(
        id=SyncPushId(0, number),
        records=int(random.integers(1, 9)),
        dense=(random.normal(size=(3, 2)).astype(np.float32), random.normal(size=()).astype(np.float32)),
        slices={"t": Slices(random.integers(0, 4, count), random.normal(size=(count, 2)).astype(np.float32))},
        states=(random.normal(size=2).astype(np.float32), np.array(number, np.int64)),
        metrics=(random.normal(size=3).astype(np.float32), np.array([number], np.int32)),
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from(["mean", "sum"]))
def test_dense_and_sparse_are_weighted_alike(seed: int, count: int, average: str) -> None:
    pushes = [random_push(number, seed) for number in range(count)]
    total = accumulate(pushes, average)
    records = sum(push.records for push in pushes)
    weights = [push.records / records if average == "mean" else 1.0 for push in pushes]
    for place in range(2):
        expected = sum(w * p.dense[place].astype(np.float64) for w, p in zip(weights, pushes, strict=True))
        np.testing.assert_allclose(total.dense[place], expected, rtol=1e-5, atol=1e-6)
    table = np.zeros((4, 2))
    for weight, push in zip(weights, pushes, strict=True):
        np.add.at(table, push.slices["t"].indices, weight * push.slices["t"].values.astype(np.float64))
    got = np.zeros((4, 2))
    for update in row_updates(pushes, average).values():
        assert len(set(update.ids.tolist())) == len(update.ids)
        got[update.ids] = update.gradients
    np.testing.assert_allclose(got, table, rtol=1e-5, atol=1e-6)
    state = sum(p.records / records * p.states[0].astype(np.float64) for p in pushes)
    np.testing.assert_allclose(total.states[0], state, rtol=1e-5, atol=1e-6)
    assert total.states[1] == count - 1
    assert total.records == records
    np.testing.assert_allclose(total.metrics[0], sum(p.metrics[0].astype(np.float64) for p in pushes))


def part(kind: DivisorKind, amount: float = 0.0, **fields: object) -> GradientPart:
    return GradientPart(Divisor(kind, amount), **fields)  # type: ignore[arg-type]


def test_every_part_weighs_what_it_was_divided_by() -> None:
    """Means by records (1:3), weights (0:2), sums (1:1), rows once; the loss metric as one batch would have it."""
    pushes = []
    for number, records, amount in ((0, 1, 0.0), (1, 3, 2.0)):
        own = f32([[number + 1.0]])
        rows = Slices(np.array([5, 6 + number]), np.concatenate([own[:1] * 0 + 7, own]))
        pushes.append(
            Push(
                SyncPushId(0, number),
                records,
                dense=(f32(number), f32(10.0)),
                metrics=(f32(9.0 * records), f32(records)),
                divisor=Divisor(DivisorKind.RECORDS),
                losses={0: 1.0 + number},
                parts=(
                    part(DivisorKind.AMOUNT, amount, dense={1: f32(100.0 * (number + 1))}, losses={0: 4.0 * number}),
                    part(DivisorKind.NOTHING, slices={"t": Slices(np.array([5]), own)}, losses={0: 1.0}),
                    part(DivisorKind.ROWS, slices={"t": rows}),
                ),
            )
        )
    total = accumulate(pushes, "mean")
    assert total.dense[0] == pytest.approx(0.75)
    assert total.dense[1] == pytest.approx(10.0 + 200.0)
    update = row_updates(pushes, "mean")["t"]
    grown = dict(zip(update.ids.tolist(), update.gradients[:, 0].tolist(), strict=True))
    assert grown == {5: 1.0 + 2.0 + 7.0, 6: 1.0, 7: 2.0}
    # (1.75 by records + 4 by weights + 2 summed) of 4 records.
    assert [float(value) for value in total.metrics] == [pytest.approx(7.75 * 4), 4.0]


def test_a_penalty_on_rows_counts_each_row_of_the_version_once() -> None:
    """Rows 5 and 6, and 6 and 7: 6 is in both micro-batches."""
    pushes = []
    for number, ids, each in ((0, [5, 6], [1.0, 2.0]), (1, [7, 6], [4.0, 2.0])):
        of_rows = Slices(np.array(ids), f32(each)[:, np.newaxis])
        rows = part(DivisorKind.ROWS, losses={0: sum(each)}, penalties={"t": of_rows})
        metrics = (f32(99.0), f32(2.0))
        pushes.append(
            Push(
                SyncPushId(0, number), 2, metrics=metrics, divisor=Divisor(DivisorKind.RECORDS), losses={0: 10.0},
                parts=(rows,),
            )
        )  # fmt: skip
    total, count = accumulate(pushes, "mean").metrics
    assert (float(total), float(count)) == (pytest.approx((10.0 + 7.0) * 4), 4.0)


def test_a_mean_that_counts_batches_counts_a_version_once() -> None:
    """1 of one record and 4 of three; and a mean of no values, which is NaN, and one of two."""
    pushes = [
        Push(
            SyncPushId(0, number), records, metrics=(f32(value), f32(1.0), f32(chosen), f32(1.0)),
            divisor=Divisor(DivisorKind.RECORDS), losses={0: value}, once=(0, 2),
            parts=(part(DivisorKind.AMOUNT, amount, losses={2: chosen}),),
        )
        for number, records, value, amount, chosen in ((0, 1, 1.0, 0.0, np.nan), (1, 3, 4.0, 2.0, 5.0))
    ]  # fmt: skip
    assert [float(value) for value in accumulate(pushes, "mean").metrics] == [pytest.approx(3.25), 1.0, 5.0, 1.0]
    empty = accumulate(pushes[:1], "mean").metrics
    assert np.isnan(empty[2])


def test_what_was_divided_by_no_weight_at_all_is_zero() -> None:
    nothing = [Push(SyncPushId(0, n), 2, (f32(0.0),), divisor=Divisor(DivisorKind.AMOUNT, 0.0)) for n in range(2)]
    assert accumulate(nothing, "mean").dense[0] == 0.0


def test_a_mean_by_its_own_count_has_the_bits_of_a_mean_by_records() -> None:
    pushes = [random_push(number, 7) for number in range(5)]
    counted = [replace(push, divisor=Divisor(DivisorKind.AMOUNT, 3.0 * push.records)) for push in pushes]
    one, other = accumulate(pushes, "mean"), accumulate(counted, "mean")
    assert one.dense[0].tobytes() == other.dense[0].tobytes()
    rows = [row_updates(each, "mean")["t"].gradients.tobytes() for each in (pushes, counted)]
    assert rows[0] == rows[1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7))
def test_equal_states_stay_equal_to_the_bit(records: list[int]) -> None:
    frozen = f32([0.1, -3.3e7, 1e-9])
    pushes = [Push(SyncPushId(0, n), count, states=(frozen,)) for n, count in enumerate(records)]
    assert np.array_equal(accumulate(pushes, "mean").states[0], frozen)


def test_half_precision_is_summed_in_single() -> None:
    pushes = [Push(SyncPushId(0, n), 1, (np.array([2048.0, 1.0], np.float16),)) for n in range(3)]
    total = accumulate(pushes, "sum").dense[0]
    assert total.dtype == np.float16
    assert total.tolist() == [6144.0, 3.0]


def test_tables_come_in_the_order_of_their_names() -> None:
    one = Slices(np.array([0]), f32([[1]]))
    there = Push(SyncPushId(0, 0), 1, slices={"b": one, "a": one, "empty": Slices(np.empty(0, int), f32([[1]])[:0])})
    assert list(row_updates([there], "sum")) == ["a", "b"]


@pytest.mark.parametrize("records", [0, -1])
def test_a_push_without_records_is_refused(records: int) -> None:
    with pytest.raises(BadInput, match="must have at least one"):
        accumulate([Push(SyncPushId(0, 0), records)], "mean")


def test_metrics_count_beyond_float32() -> None:
    total = add_metrics((), [(f32([2**24]),)])
    assert add_metrics(total, [(f32([1]),), (f32([1]),)])[0].tolist() == [2**24 + 2]
    assert add_metrics((), [(np.array([2**31 - 1], np.int32),)] * 2)[0].tolist() == [2**32 - 2]


EXPECTED = Expected(
    variables=(TensorSpec("dense/kernel", (2, 3), np.dtype(np.float32)),),
    states=(TensorSpec("bn/mean", (3,), np.dtype(np.float32)), TensorSpec("count", (), np.dtype(np.int64))),
    metrics=(TensorSpec("loss/total", (), np.dtype(np.float32)),),
    tables={"t": TableSpec("t", 2, vocabulary_size=5)},
)


ROW = Slices(np.array([0]), f32([[0, 0]]))


def good(**changes: object) -> Push:
    fields: dict[str, object] = {
        "id": SyncPushId(0, 0),
        "records": 1,
        "dense": (np.zeros((2, 3), np.float32),),
        "slices": {"t": Slices(np.array([4, 4]), np.zeros((2, 2), np.float32))},
        "states": (np.zeros(3, np.float32), np.array(0, np.int64)),
        "metrics": (f32(0),),
    }
    return Push(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dense": ()}, BadGradient, "0 dense gradient tensors where the model has 1: dense/kernel"),
        ({"dense": (np.zeros((3, 2), np.float32),)}, BadGradient, r"'dense/kernel': want float32 \[2, 3\]"),
        ({"dense": (np.zeros((2, 3)),)}, BadGradient, "got float64"),
        ({"states": (np.zeros(4, np.float32), np.array(0))}, BadGradient, "'bn/mean'"),
        ({"metrics": ()}, BadGradient, "0 metric tensors"),
        ({"slices": {"u": ROW}}, TableNotFound, r"'u'.*tables: t"),
        ({"slices": {"t": Slices(np.array([5]), f32([[0, 0]]))}}, IdOutOfRange, "'t': id 5 at position 0"),
        ({"slices": {"t": Slices(np.array([-1]), f32([[0, 0]]))}}, IdOutOfRange, "'t': id -1 at position 0"),
        ({"slices": {"t": Slices(np.array([1]), f32([[0, 0, 0]]))}}, BadGradient, r"'t'.*\[1, 2\]"),
        ({"slices": {"t": Slices(np.array([1]), np.zeros((1, 2)))}}, BadGradient, "float64"),  # type: ignore[arg-type]
        ({"divisor": Divisor(DivisorKind.AMOUNT, -1.0)}, BadGradient, r"divided by -1.0"),
        ({"divisor": Divisor(DivisorKind.AMOUNT, np.nan)}, BadGradient, "divided by nan"),
        ({"parts": (part(DivisorKind.AMOUNT, np.inf),)}, BadGradient, "divided by inf"),
        ({"parts": (part(DivisorKind.NOTHING),) * 65}, BadGradient, "at most 64"),
        ({"once": (0,)}, BadGradient, "no total of a mean"),
        ({"parts": (part(DivisorKind.ROWS, penalties={"u": ROW}),)}, TableNotFound, "'u'"),
        ({"parts": (part(DivisorKind.ROWS, penalties={"t": ROW}),)}, BadGradient, "penalties of table 't'"),
        ({"parts": (part(DivisorKind.NOTHING, dense={1: f32(0)}),)}, BadGradient, "variable 1 where the model has 1"),
        ({"parts": (part(DivisorKind.NOTHING, dense={0: f32(0)}),)}, BadGradient, r"'dense/kernel': want"),
        ({"parts": (part(DivisorKind.ROWS, slices={"u": ROW}),)}, TableNotFound, "'u'"),
        ({"losses": {0: 1.0}}, BadGradient, "metric tensor 0 of 1"),
        ({"losses": {-1: 1.0}}, BadGradient, "metric tensor -1"),
    ],
)
def test_a_push_that_does_not_fit_is_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    check_push(good(), EXPECTED)
    with pytest.raises(error, match=message):
        check_push(good(**changes), EXPECTED)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["dense", "states", "slices"])
def test_values_that_are_not_finite_are_refused_by_name(place: str, bad: float) -> None:
    push = good()
    check_finite(push, EXPECTED)
    values = push.slices["t"].values if place == "slices" else getattr(push, place)[0]
    values[-1] = bad
    with pytest.raises(NotFinite, match={"dense": "dense/kernel", "states": "bn/mean", "slices": "'t'.*id 4"}[place]):
        check_finite(push, EXPECTED)


def test_a_part_that_is_not_finite_is_refused_by_name() -> None:
    dense = part(DivisorKind.NOTHING, dense={0: np.full((2, 3), np.nan, np.float32)})
    rows = part(DivisorKind.ROWS, slices={"t": Slices(np.array([3]), f32([[np.inf, 0]]))})
    for bad, message in ((dense, "dense/kernel"), (rows, "'t'.*id 3")):
        with pytest.raises(NotFinite, match=message):
            check_finite(good(parts=(bad,)), EXPECTED)


def test_an_evaluation_that_does_not_fit_is_refused() -> None:
    check_evaluation(api.EvaluationReport("w", 1, 0, 1, (f32(0),)), EXPECTED)
    with pytest.raises(BadGradient, match="loss/total"):
        check_evaluation(api.EvaluationReport("w", 1, 0, 1, (np.array(0.0),)), EXPECTED)


RECORDS = [3, 3, 3, 3, 3, 3, 3, 2]


def pushes_of_version_zero() -> list[Push]:
    return [replace(random_push(number, 0), records=records) for number, records in enumerate(RECORDS)]


def bits(pushes: Sequence[Push]) -> list[bytes]:
    made = accumulate(pushes, "mean")
    update = row_updates(pushes, "mean")["t"]
    return [array.tobytes() for array in (*made.dense, update.ids, update.gradients, *made.states, *made.metrics)]


def test_a_push_whose_loss_is_divided_otherwise_is_refused() -> None:
    """Workers that run different models: what they pushed could not be combined."""
    state = JobState(job_of(grads_to_wait=8), MasterOptions(), Progress(), lambda: 0.0)
    state.board.open()
    first, second, *_ = pushes_of_version_zero()
    state.take(replace(first, divisor=Divisor(DivisorKind.NOTHING)), skipped=False)
    other = (GradientPart(Divisor(DivisorKind.AMOUNT, 1.0)),)
    with pytest.raises(BadGradient, match="micro-batch 1 divides its loss by records, amount, and another one of its"):
        state.judge(replace(second, divisor=Divisor(DivisorKind.RECORDS), parts=other))
    assert state.judge(replace(second, divisor=Divisor(DivisorKind.NOTHING))) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=20), st.permutations(range(8)))
def test_any_order_of_arrival_and_any_duplicates_give_the_same_bits(early: list[int], order: list[int]) -> None:
    state = JobState(job_of(grads_to_wait=8), MasterOptions(), Progress(), lambda: 0.0)
    state.board.open()
    pushes = pushes_of_version_zero()
    expected = bits(pushes)
    seen: set[int] = set()
    for number in [*early, *order]:
        found = state.judge(pushes[number])
        assert (found is None) is (number not in seen)
        if found is None:
            state.take(pushes[number], skipped=False)
        elif isinstance(found, tuple):
            assert found[0] is PushOutcome.DUPLICATE
        seen.add(number)
        assert (state.next_work() is not None) is (len(seen) == 8)
    work = state.next_work() or Work()
    taken = [ticket.push for ticket in work.tickets or () if ticket.push is not None]
    assert bits(taken) == expected
    assert state.committed(work.tickets or (), accumulate(taken, "mean"))
    assert (state.version, state.records, state.epoch) == (1, 23, 1)


def test_incarnations_are_remembered_up_to_a_bound() -> None:
    sequences = Sequences({"old": 3})
    assert sequences.last("old") == 3
    assert sequences.last("new") == 0
    for number in range(65_536):
        sequences.remember(api.AsyncPushId(f"n{number}", 1))
    assert len(sequences.as_dict()) == 65_536
    assert sequences.last("old") == 0
