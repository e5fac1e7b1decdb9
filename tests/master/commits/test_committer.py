"""Commits of rows are made exactly once or fail by the deadline; clipping does what Keras does."""

from collections.abc import Mapping
from dataclasses import replace

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadGradient, BadInput, StoreFailed, Unavailable
from elastable.embedding_store.measures import CLOCK
from elastable.embedding_store.shards.server_contract import PushedCommit, RowPush, RowSums, Slices, TableClip
from elastable.embedding_store.shards.version_sums import clipped_update, exact_squares, square_of
from elastable.master.api import JobSpec, Push, SyncPushId, Tensor
from elastable.master.commits.accumulate import WeightedPushes
from elastable.master.commits.committer import Committer
from elastable.master.commits.dense_part import Clipping, DensePart, clip
from elastable.master.commits.row_gradients import OwnRowGradients, PushesLost, RowGradients
from elastable.master.model.keras_optimizer import clipping_of
from elastable.master.tasks.progress import Progress
from tests.embedding_store.shards.served_shards import begin_job, served

SPEC = TableSpec("t", 1, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))
PUSH = Push(SyncPushId(0, 0), 1, slices={"t": Slices(np.array([5]), np.ones((1, 1), np.float32))})


class Shaky(MemoryStore):
    """Goes through a script: "fail", "lose" (commits, then fails), "away" (cannot even tell its version)."""

    def __init__(self, *script: str) -> None:
        super().__init__()
        self.create_table(SPEC)
        self.script = list(script)

    def commit(self, commit: Commit) -> None:
        doing = self.script.pop(0) if self.script else "commit"
        if doing in ("commit", "lose"):
            super().commit(commit)
        if doing != "commit":
            raise StoreFailed("shaky")

    def version(self) -> int:
        if self.script and self.script[0] == "away":
            self.script.pop(0)
            raise Unavailable("shaky:6379 is away")
        return super().version()


class Time:
    """A clock that moves by sleeping."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def commit(store: EmbeddingStore, time: Time, push: Push = PUSH, record: bytes | None = None) -> None:
    weighted, sums = WeightedPushes([push], "mean"), RowSums(0)
    rows = OwnRowGradients(store, sums, ("t",), 10.0, weighted.row_updates(()))
    rows.commit(PushedCommit(sums, 0, {}, record=record), time.now, time.sleep)


@pytest.mark.parametrize(
    "script", [[], ["fail"], ["lose"], ["fail", "fail", "lose"], ["lose", "away", "away"], ["fail", "away", "lose"]]
)
def test_rows_change_exactly_once(script: list[str]) -> None:
    store, time = Shaky(*script), Time()
    commit(store, time)
    assert store.version() == 1
    assert store.lookup({"t": np.array([5])})["t"].tolist() == [[-1.0]]


def test_the_last_failure_is_raised_at_the_deadline() -> None:
    store, time = Shaky(*["fail"] * 1000), Time()
    with pytest.raises(StoreFailed, match="shaky"):
        commit(store, time)
    assert 8.0 < time.seconds <= 10.0
    store = Shaky("lose", *["away"] * 1000)
    with pytest.raises(Unavailable, match="away"):
        commit(store, time)


def test_what_is_wrong_with_the_commit_is_not_tried_again() -> None:
    store, time = Shaky(), Time()
    with pytest.raises(BadGradient):
        commit(store, time, replace(PUSH, slices={"t": Slices(np.array([5]), np.ones((1, 2), np.float32))}))
    assert time.seconds == 0.0


def test_a_version_that_another_master_made_is_not_taken_for_ours() -> None:
    """The store was taken over while this master's commit hung, and there is a version of the same number."""

    class TakenOver(Shaky):
        keeps_records = True

        def record(self) -> bytes | None:
            return b"theirs"

        def commit(self, commit: Commit) -> None:
            if not self.script:
                raise BadInput("taken over")
            super().commit(commit)

    store, time = TakenOver("lose"), Time()
    with pytest.raises(BadInput, match="taken over"):
        commit(store, time, record=b"ours")


def test_the_time_of_a_version_is_decided_once_by_the_master() -> None:
    """The store is asked twice for version 2, and keeps the time that it was first given."""
    spec = replace(SPEC, name="timed", eviction=EvictionSpec(ttl=1.0))
    asked: list[float] = []

    def clock() -> float:
        asked.append(1000.0 + 0.75 * len(asked))
        return asked[-1]

    store = Shaky("commit", "fail", "lose")
    store.create_table(spec)
    committer = Committer(store, DensePart(), JobSpec(job="j"), 10.0, clock=clock)
    for version in (1, 2, 3):
        row = np.ones((1, 1), np.float32)
        store.put("timed", [RowBlock(np.array([version]), row, row[:, :0])])  # touched by the next commit
        committer.commit(version, [], lambda _: Progress(0))
    assert asked == [1000.0, 1000.75, 1001.5]
    assert [block.ids.tolist() for block in store.scan("timed")] == [[2, 3]]
    times = store.table_state("timed").touch_times
    assert times is not None
    assert times[:, 2].tolist() == [1_000_000, 1_000_750, 1_001_500]


def test_the_time_of_a_version_is_that_of_the_clock_that_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLOCK, "_reported", 0.0)
    monkeypatch.setattr(CLOCK, "_began", CLOCK._began - 1e6)  # the system's was set ahead by as much since
    store = Shaky()
    store.create_table(replace(SPEC, name="timed", eviction=EvictionSpec(ttl=60.0)))
    Committer(store, DensePart(), JobSpec(job="j"), 10.0).commit(1, [], lambda _: Progress(0))
    times = store.table_state("timed").touch_times
    assert times is not None
    assert abs(times[0, 2] / 1000 - CLOCK.now()) < 1e5


def test_pushes_that_a_store_server_has_lost_are_named_and_nothing_is_committed() -> None:
    """Real servers, of which nobody pushed to one: `commit` says what is missing, and so does what measures."""
    with served(2) as (_, servers):
        servers.create_table(SPEC)
        begin_job(servers, "j")
        sums = WeightedPushes([PUSH], "mean").row_sums(0, ())
        rows = RowGradients(servers, sums, ("t",), 60.0)
        for lost in (rows.finite, lambda: rows.commit(PushedCommit(sums, 0, {"t": 1.0}))):
            with pytest.raises(PushesLost) as caught:
                lost()
            assert caught.value.numbers == (0,)
        assert servers.version() == 0
        servers.push_rows(RowPush("j", 0, 0, (PUSH.slices,)))
        made = Committer(servers, DensePart(), JobSpec(job="j"), 60.0).commit(1, [PUSH], lambda _: Progress(1))
        assert (servers.version(), tuple(made.changed)) == (1, ("t",))


class OneNumber(DensePart):
    """A dense part of one number, which every step makes one more."""

    def __init__(self) -> None:
        self.value, self.reads = 0.0, 0

    def tensors(self) -> dict[str, Tensor]:
        self.reads += 1
        return {"variables/00000": np.array(self.value)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.value = float(tensors["variables/00000"])

    def skip(self) -> None:
        self.value += 1.0


class Recording(Shaky):
    """A store that keeps the record of its version."""

    keeps_records = True


def test_what_nobody_assigned_is_read_once_a_version() -> None:
    dense = OneNumber()
    committer = Committer(Recording(), dense, JobSpec(job="j"), 10.0)
    for version in (1, 2, 3):
        committer.commit(version, [], lambda _: Progress(0))
    assert (dense.value, dense.reads) == (3.0, 4)
    committer.forget()
    committer.commit(4, [], lambda _: Progress(0))
    assert dense.reads == 6


@pytest.mark.parametrize("assigned", [None, 7.0])
def test_a_version_that_fails_leaves_the_dense_part_as_it_was(assigned: float | None) -> None:
    dense, store = OneNumber(), Recording()
    committer = Committer(store, dense, JobSpec(job="j"), 0.0)
    committer.commit(1, [], lambda _: Progress(0))
    if assigned is not None:
        dense.value = assigned
        committer.forget()
    store.script = ["fail"] * 10
    with pytest.raises(StoreFailed):
        committer.commit(2, [], lambda _: Progress(0))
    assert dense.value == (1.0 if assigned is None else assigned)


IDS = np.array([7, 1, 4])


def gradients(scale: float) -> list[Array]:
    random = np.random.default_rng(0)
    return [(random.normal(size=shape) * scale).astype(np.float32) for shape in ((4, 3), (3,), (10, 2))]


def clipped(parts: list[Array], clipping: Clipping) -> tuple[tuple[Tensor, ...], TableUpdate]:
    """Two variables and a table, of which clipping gets the square alone."""
    update = TableUpdate(IDS, parts[2][IDS])
    square = exact_squares(update.gradients)
    assert square is not None
    dense, tables = clip(parts[:2], {"t": square_of(square)}, clipping)
    return dense, clipped_update(update, tables.get("t", TableClip()))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 50.0])
@pytest.mark.parametrize("how", [{"clipnorm": 1.5}, {"global_clipnorm": 1.5}, {"clipvalue": 0.3}, {"clipnorm": 0}, {}])
def test_clipping_is_keras_own(how: dict[str, float], scale: float) -> None:
    parts = gradients(scale)
    parts[2][[row for row in range(10) if row not in IDS]] = 0
    optimizer = keras.optimizers.SGD(1.0, **how)
    variables = [keras.Variable(np.zeros_like(part)) for part in parts]
    optimizer.apply([keras.ops.convert_to_tensor(part) for part in parts], variables)
    expected = [-variable.value.numpy() for variable in variables]

    dense, update = clipped(parts, clipping_of(optimizer))
    for ours, keras_own in zip(dense, expected[:2], strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-6, atol=1e-9)
        assert ours.dtype == np.float32
    np.testing.assert_allclose(update.gradients, expected[2][IDS], rtol=1e-6, atol=1e-9)
    assert update.gradients.dtype == np.float32
    assert update.ids is IDS


def test_what_is_within_the_norm_is_left_alone_to_the_bit() -> None:
    parts = gradients(1e-3)
    for clipping in (Clipping(clipnorm=1.0), Clipping(global_clipnorm=1.0), Clipping()):
        dense, update = clipped(parts, clipping)
        assert np.array_equal(update.gradients, parts[2][IDS])
        assert all(np.array_equal(one, other) for one, other in zip(dense, parts[:2], strict=True))
