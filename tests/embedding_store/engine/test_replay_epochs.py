"""Replay epochs: who goes on from a checkpoint of a replay epoch's end has the bits of who went on without."""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastable.embedding_store import (
    Commit,
    EvictionSpec,
    MemoryStore,
    OptimizerSpec,
    PartitionedStore,
    TableSpec,
    TableUpdate,
)
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import dense_replay
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.optimizers.dense_replay import table_steps
from elastable.embedding_store.optimizers.registry import row_optimizer
from tests.embedding_store.engine.failing_tier import FailingTier
from tests.embedding_store.engine.test_catch_up_stores import STORES
from tests.embedding_store.engine.tiered_stores import crowded_store
from tests.file_stores import file_store
from tests.plugins.seeds import examples

DIM, ROWS = 5, 30
IDS = np.arange(ROWS)

OPTIMIZERS = {
    "sgd momentum": OptimizerSpec.of("sgd", lazy=False, momentum=0.9),
    "sgd nesterov, decay": OptimizerSpec.of("sgd", lazy=False, momentum=0.8, nesterov=1.0, weight_decay=0.02),
    "sgd, decay alone": OptimizerSpec.of("sgd", lazy=False, weight_decay=0.02),
    "adagrad, decay": OptimizerSpec.of("adagrad", lazy=False, weight_decay=0.02),
    "rowwise adagrad, decay": OptimizerSpec.of("rowwise_adagrad", lazy=False, weight_decay=0.02),
    "adam": OptimizerSpec.of("adam", lazy=False),
    "adam 0.5 0.9": OptimizerSpec.of("adam", lazy=False, beta_1=0.5, beta_2=0.9),
    "adam 0.95 0.999": OptimizerSpec.of("adam", lazy=False, beta_1=0.95),
    "adam 0 0.999": OptimizerSpec.of("adam", lazy=False, beta_1=0.0),
    "amsgrad, decay": OptimizerSpec.of("adam", lazy=False, amsgrad=1.0, weight_decay=0.01),
    "adamw": OptimizerSpec.of("adamw", lazy=False, weight_decay=0.01),
    "rmsprop, moments alone": OptimizerSpec.of("rmsprop", lazy=False),
    "rmsprop momentum": OptimizerSpec.of("rmsprop", lazy=False, momentum=0.9),
    "rmsprop centered, decay": OptimizerSpec.of("rmsprop", lazy=False, centered=1.0, weight_decay=0.01),
    "adamax": OptimizerSpec.of("adamax", lazy=False),
    "adadelta": OptimizerSpec.of("adadelta", lazy=False, rho=0.9),
}

STEPS, ENDS = 600, (13, 14, 60, 450)
"""The last replay epoch but one is long enough that sums are taken in blocks; some rows are behind by all of them."""

Everything = tuple[dict[int, tuple[bytes, ...]], bytes, TableState]


def step(store: EmbeddingStore, number: int, ends: bool, tables: Sequence[str] = "t") -> None:
    """The step to version `number` of a seeded job: rows 0 to 9 come often, others at 3, 10, 30, 100, ... steps."""
    random = np.random.default_rng(number)
    ids = [*random.choice(10, size=random.integers(0, 4), replace=False)]
    ids += [10 + i for i in range(15) if number % (3 ** (1 + i % 6)) == i % 3]
    ids += [25] * (number == 2) + [26] * (number in (5, 560)) + [27] * (number == 13)
    updates = {
        name: TableUpdate(np.array(ids), random.normal(size=(len(ids), DIM)).astype(np.float32)) for name in tables
    }
    rates = dict.fromkeys(tables, 0.01 + 0.009 * float(np.sin(number / 7)))
    store.commit(Commit(number, updates if ids else {}, number - 1, rates, ends_replay_epoch=ends))


def everything(source: Snapshot, table: str = "t", ids: np.ndarray = IDS) -> Everything:
    """Every bit of a table: rows with slots and touches, what lookups give, and what decay has made of other rows."""
    rows: dict[int, tuple[bytes, ...]] = {}
    for block in source.scan(table, 7):
        for i, one in enumerate(block.ids.tolist()):
            touches = b"" if block.touches is None else block.touches[i].tobytes()
            rows[one] = (block.weights[i].tobytes(), block.slots[i].tobytes(), touches)
    return rows, source.lookup({table: ids})[table].tobytes(), source.table_state(table)


def restore(source: Snapshot, into: EmbeddingStore, version: int) -> None:
    """What a checkpoint holds of `source`, put into an empty store as it is restored."""
    for name, spec in source.specs().items():
        into.create_table(spec)
        into.clear(name)
        into.put(name, source.scan(name, 4))
        if state := source.table_state(name):
            into.put_table_state(name, state)
    into.reset_version(version)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_table_goes_on_with_the_same_bits(name: str) -> None:
    spec = TableSpec("t", DIM, ROWS, optimizer=OPTIMIZERS[name])
    with ExitStack() as held:

        def new() -> MemoryStore:
            return held.enter_context(MemoryStore(1))

        whole, once, often = new(), new(), new()
        for store in (whole, once, often):
            store.create_table(spec)
        for number in range(1, STEPS + 1):
            for store in (whole, once, often):
                step(store, number, number in ENDS)
            if number in ENDS:
                killed, often = often, new()
                restore(killed, often, number)
                if number == ENDS[0]:
                    killed, once = once, new()
                    restore(killed, once, number)
        expected = everything(whole)
        assert everything(once) == expected
        assert everything(often) == expected


@pytest.fixture(scope="module")
def expected() -> dict[int, Everything]:
    """What one table in memory that nothing happens to holds at some versions."""
    found = {}
    with MemoryStore(1) as store:
        store.create_table(TableSpec("t", DIM, ROWS, optimizer=OPTIMIZERS["adamw"]))
        for number in range(1, 91):
            step(store, number, number in ENDS)
            if number in (20, 60, 70, 90):
                found[number] = everything(store)
    return found


@pytest.mark.parametrize("kind", STORES)
def test_every_store_is_killed_and_restored_to_the_same_bits(
    kind: str, tmp_path: Path, expected: dict[int, Everything]
) -> None:
    """Restored from another kind of store, and with other shards; and pinned versions are those of their replay
    epochs."""
    with ExitStack() as held:
        before = held.enter_context(STORES[kind](held, tmp_path / "before"))
        after = held.enter_context(PartitionedStore([MemoryStore(1), MemoryStore(1)], "token"))
        again = held.enter_context(STORES[kind](held, tmp_path / "after"))
        before.create_table(TableSpec("t", DIM, ROWS, optimizer=OPTIMIZERS["adamw"]))
        for number in range(1, 61):
            step(before, number, number in ENDS)
            if number == 20:
                early = held.enter_context(before.pin())
        last = held.enter_context(before.pin())
        for number in range(61, 91):
            step(before, number, False)
            if number == 70:
                assert everything(early) == expected[20]
                assert everything(last) == expected[60]
        assert everything(before) == expected[90]
        restore(last, after, 60)
        restore(after, again, 60)
        for number in range(61, 91):
            step(after, number, False)
            step(again, number, False)
            if number == 70:
                assert everything(after) == expected[70]
        assert everything(after) == expected[90]
        assert everything(again) == expected[90]
        assert everything(early) == expected[20]


def test_a_table_that_is_cleared_begins_as_a_new_one() -> None:
    """A checkpoint may be restored into a store whose tables were trained before."""
    optimizer = OptimizerSpec.of("adamw", lazy=False, weight_decay=0.05, beta_1=0.5, beta_2=0.9)
    spec = TableSpec("t", DIM, ROWS, optimizer=optimizer)
    with MemoryStore(1) as store, MemoryStore(1) as used, MemoryStore(1) as new:
        for one in (store, used, new):
            one.create_table(spec)
        for number in range(1, 31):
            step(store, number, number == 30)
            step(used, number, number == 7)
        for one in (used, new):
            restore(store, one, 30)
        for number in range(31, 501):
            for one in (store, used, new):
                step(one, number, number == 400)
            if number % 20 == 0:
                assert everything(store) == everything(used) == everything(new)


@pytest.mark.parametrize("kind", ["memory", "indexed", "file", "crowded"])
def test_replay_epochs_that_no_row_needs_are_forgotten(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk over the table that sees to it changes no bit, pinned versions included."""
    found = []
    for most in (dense_replay._REPLAY_EPOCHS, 1 << 30):
        monkeypatch.setattr(dense_replay, "_REPLAY_EPOCHS", most)
        with ExitStack() as held, STORES[kind](held, tmp_path / str(most)) as store:
            assert isinstance(store, MemoryStore)
            store.create_table(TableSpec("t", DIM, ROWS, optimizer=OPTIMIZERS["adamw"]))
            remembered, counts, pinned = store._tables["t"].replay, [], []
            assert remembered is not None
            for number in range(1, 301):
                step(store, number, number % 2 == 0)
                counts.append(remembered.steps.replay_epochs)
                if number == 170:
                    pin = store.pin()
                    pinned = [everything(pin)]
                if number == 250:
                    pinned.append(everything(pin))
                    pin.close()
            assert pinned[0] == pinned[1]
            found.append((everything(store), pinned[0]))
            assert (max(counts) < 100) == (counts[-1] < 100) == (most < 100)
    assert found[0] == found[1]


def test_steps_that_nobody_saved_are_refused() -> None:
    form = row_optimizer(OPTIMIZERS["adamw"]).dense_form
    assert form is not None
    steps, other = table_steps.TableSteps("t", form), table_steps.TableSteps("t", form)
    for number in range(1, 8):
        steps.take(number, 0.01, number in (2, 5))
    saved = steps.save()
    other.restore(saved)
    assert other.save() == saved
    assert (other.first, other.now, other.replay_epoch, other.replay_epochs) == (1, 8, 6, 3)
    for wrong in (b"", saved[:-1], saved[:-8], saved[8:], saved + saved[:24], np.full(4, np.nan).tobytes()):
        with pytest.raises(StoreFailed, match="steps of table 't' are not what was saved"):
            other.restore(wrong)
    assert other.save() == saved


MOST = 48
"""Steps that the tables below remember: replay epochs end by themselves after 12."""

LIVING = {
    spec.name: spec
    for spec in (
        TableSpec("adamw", DIM, ROWS, optimizer=OPTIMIZERS["adamw"]),
        TableSpec("seventh", DIM, optimizer=OPTIMIZERS["adam 0.95 0.999"], eviction=EvictionSpec(max_age=20, every=3)),
        TableSpec("nesterov", DIM, optimizer=OPTIMIZERS["sgd nesterov, decay"]),
        TableSpec("moments", DIM, ROWS, optimizer=OPTIMIZERS["rmsprop, moments alone"]),
    )
}


class ReplayEpochsInAnyHistory(RuleBasedStateMachine):
    """One store that nothing happens to, and one that is killed, restored elsewhere, pinned, closed and swept."""

    @initialize()
    def begin(self) -> None:
        fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="replay-epochs-", dir=fast))
        self.held = ExitStack()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(dense_replay, "TableSteps", lambda name, form: table_steps.TableSteps(name, form, most=MOST))
        self.made = 0
        self.whole: EmbeddingStore = self.held.enter_context(MemoryStore(1, direct_bytes=1 << 30))
        self.killed = self.new("direct")
        for spec in LIVING.values():
            for store in (self.whole, self.killed):
                store.create_table(spec)
        self.ended = False
        self.pins: list[tuple[Snapshot, dict[str, Everything]]] = []
        self.commit([1, 2, 3], False)

    def new(self, kind: str) -> EmbeddingStore:
        self.made += 1
        folder = self.folder / str(self.made)
        self.open_again: Callable[[], EmbeddingStore] | None = None
        if kind == "file":
            self.open_again = functools.partial(file_store, folder)
        if kind == "crowded":
            self.open_again = functools.partial(crowded_store, self.held, FailingTier(), folder)
        if self.open_again is not None:
            return self.open_again()
        if kind == "encoding":
            return PartitionedStore([MemoryStore(1), MemoryStore(1)], "encoding")
        return MemoryStore(1, direct_bytes=0 if kind == "indexed" else 1 << 30)

    def both(self) -> Iterator[EmbeddingStore]:
        yield from (self.whole, self.killed)

    @rule(ids=st.lists(st.integers(0, 12), max_size=6, unique=True), ends=st.booleans())
    def commit(self, ids: list[int], ends: bool) -> None:
        version = self.whole.version()
        random = np.random.default_rng(version)
        gradients = random.normal(size=(len(ids), DIM)).astype(np.float32)
        updates = {name: TableUpdate(np.array(ids), gradients) for name in LIVING} if ids else {}
        rate = 0.01 * float(random.uniform())
        for store in self.both():
            store.commit(Commit(version + 1, updates, version, dict.fromkeys(LIVING, rate), ends_replay_epoch=ends))
        self.ended = ends

    @rule(steps=st.integers(2, 40))
    def nobody_comes(self, steps: int) -> None:
        for _ in range(steps):
            self.commit([], False)

    @rule()
    def end(self) -> None:
        self.commit([7], True)

    @precondition(lambda self: self.ended)
    @rule(kind=st.sampled_from(["direct", "indexed", "file", "encoding", "crowded"]))
    def kill_and_restore(self, kind: str) -> None:
        self.release()
        store = self.new(kind)
        restore(self.killed, store, self.killed.version())
        self.killed.close()
        self.killed = store

    @precondition(lambda self: self.open_again is not None)
    @rule()
    def close_and_open(self) -> None:
        assert self.open_again is not None
        self.release()
        self.killed.close()
        self.killed = self.open_again()

    @precondition(lambda self: len(self.pins) < 3)
    @rule()
    def pin(self) -> None:
        # Rows that were deleted since a version was pinned first are there for whoever pins it again.
        same = [expected for pin, expected in self.pins if pin.version() == self.killed.version()]
        expected = same[0] if same else {name: everything(self.whole, name, IDS[:14]) for name in LIVING}
        self.pins.append((self.killed.pin(), expected))

    @rule(number=st.integers(0, 2))
    def unpin(self, number: int) -> None:
        if number < len(self.pins):
            self.pins.pop(number)[0].close()

    @rule(ids=st.lists(st.integers(0, 12), min_size=1, max_size=3, unique=True))
    def delete(self, ids: list[int]) -> None:
        for store in self.both():
            for name in LIVING:
                store.delete(name, np.array(ids))

    @invariant()
    def bits_are_the_same(self) -> None:
        if hasattr(self, "pins"):
            for name in LIVING:
                assert everything(self.whole, name, IDS[:14]) == everything(self.killed, name, IDS[:14]), name
                for pin, expected in self.pins:
                    assert everything(pin, name, IDS[:14]) == expected[name], name

    def release(self) -> None:
        for pin, _ in self.pins:
            pin.close()
        self.pins.clear()

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            self.release()
            self.killed.close()
            self.held.close()
            self.patch.undo()
            shutil.rmtree(self.folder, ignore_errors=True)


TestReplayEpochsInAnyHistory = ReplayEpochsInAnyHistory.TestCase
TestReplayEpochsInAnyHistory.settings = settings(
    max_examples=examples(25), stateful_step_count=18, deadline=None, suppress_health_check=list(HealthCheck)
)
