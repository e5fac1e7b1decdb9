"""Dense replay in every store: the numbers of a table that takes every step, and after a restore the same bits."""

import functools
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from elastable.embedding_store import AdmissionSpec, EvictionSpec, IndexedSlices, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.composite.moving import repartition
from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import Commit, TableState, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import dense_replay
from elastable.embedding_store.errors import BadInput, BadSpec, StoreFailed, Unsupported
from elastable.embedding_store.optimizers.dense_replay import table_steps
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.optimizers.registry import known_dense_forms, row_optimizer
from elastable.embedding_store.tables.row_blocks import convert_table
from tests.contracts.reference_rows import REFERENCES
from tests.contracts.store_history import SPECS, History, Program, Random, programs
from tests.contracts.store_history import commit_of as history_commit
from tests.contracts.store_samples import create_tables
from tests.embedding_store.engine.tiered_stores import crowded_store
from tests.embedding_store.tiers.dict_tier import DictTier
from tests.file_stores import file_store, quick_folder
from tests.plugins.seeds import examples

DIM, ROWS = 5, 30
IDS = np.arange(ROWS)

MOST = 48
"""Steps that some tables below remember: replay epochs end by themselves after 12."""

OPTIMIZERS = {
    **{
        f"{name} {number}": OptimizerSpec.of(name, lazy=False, **variant)
        for name in known_dense_forms()
        for number, variant in enumerate(REFERENCES[name].variants)
    },
    "adam 0.95 0.999": OptimizerSpec.of("adam", lazy=False, beta_1=0.95),
    "adam 0 0.999": OptimizerSpec.of("adam", lazy=False, beta_1=0.0),
    "adamw": OptimizerSpec.of("adamw", lazy=False, weight_decay=0.01),
    "nesterov": OptimizerSpec.of("sgd", lazy=False, momentum=0.8, nesterov=1.0, weight_decay=0.02),
    "rmsprop, moments alone": OptimizerSpec.of("rmsprop", lazy=False),
}

STEPS, ENDS = 600, (13, 14, 60, 450)
"""The last replay epoch but one is long enough that sums are taken in blocks; some rows are behind by all of them."""

Everything = tuple[dict[int, tuple[bytes, ...]], bytes, TableState]


ADAMW = OPTIMIZERS["adamw"]


def table(name: str = "t", size: int | None = ROWS, optimizer: OptimizerSpec = ADAMW, **settings: object) -> TableSpec:
    return TableSpec(name, DIM, size, optimizer=optimizer, **settings)  # type: ignore[arg-type]


def made(store: EmbeddingStore, spec: TableSpec | None = None) -> EmbeddingStore:
    store.create_table(spec or table())
    return store


@functools.cache
def commit_of(number: int, ends: bool = False, frozen: bool = False, version: int | None = None) -> Commit:
    """Step `number` of a seeded job: rows 0 to 9 come often, others at 3, 10, 30, 100, ... steps."""
    random = np.random.default_rng(number)
    ids = [*random.choice(10, size=random.integers(0, 4), replace=False)]
    ids += [10 + i for i in range(15) if number % (3 ** (1 + i % 6)) == i % 3]
    ids += [25] * (number == 2) + [26] * (number in (5, 560)) + [27] * (number == 13)
    update = TableUpdate(np.array(ids), random.normal(size=(len(ids), DIM)).astype(np.float32))
    rates = {"t": 0.01 + 0.009 * float(np.sin(number / 7))}
    updates = {"t": update} if ids and not frozen else {}
    return Commit(version or number, updates, number - 1, rates, ends_replay_epoch=ends, frozen=("t",) * frozen)


def step(store: EmbeddingStore, number: int, ends: bool = False, frozen: bool = False) -> None:
    store.commit(commit_of(number, ends, frozen))


def steps(store: EmbeddingStore, first: int, last: int) -> None:
    for number in range(first, last + 1):
        step(store, number)


def rows(store: EmbeddingStore) -> Float32:
    return store.lookup({"t": IDS})["t"]


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


Make = Callable[[ExitStack, Path], EmbeddingStore]


STORES: dict[str, Make] = {
    "memory": lambda held, path: MemoryStore(threads=2),
    "indexed": lambda held, path: MemoryStore(threads=1, direct_bytes=0),
    "file": lambda held, path: file_store(path / "file", 1 << 20, threads=1),
    "crowded": lambda held, path: crowded_store(held, DictTier(), path / "log"),
    "encoding": lambda held, path: PartitionedStore([MemoryStore(1), file_store(path / "half", 1 << 20)], "encoding"),
}
"""Every other kind of store goes through the histories of `tests.contracts.store_history`, on such tables, too."""


@pytest.mark.sampled(2)
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


@pytest.mark.parametrize("kind", STORES)
def test_rows_restored_within_a_replay_epoch_are_equal_to_rounding(kind: str, tmp_path: Path) -> None:
    with ExitStack() as held, made(MemoryStore(1)) as whole, STORES[kind](held, tmp_path) as store:
        steps(whole, 1, 20)
        restore(whole, store, 20)
        assert np.array_equal(rows(store), rows(whole))
        for each in (whole, store):
            steps(each, 21, 60)
        np.testing.assert_allclose(rows(store), rows(whole), rtol=2e-6, atol=1e-7)


FORGETTING = pytest.mark.parametrize("kind", ["indexed", "crowded"])


@FORGETTING
def test_replay_epochs_nobody_needs_are_forgotten(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (dense_replay._REPLAY_EPOCHS, 1 << 30):
        monkeypatch.setattr(dense_replay, "_REPLAY_EPOCHS", most)
        with ExitStack() as held, made(STORES[kind](held, tmp_path / str(most))) as store:
            assert isinstance(store, MemoryStore)
            remembered, counts = store._tables["t"].replay, []
            assert remembered is not None
            for number in range(1, 301):
                step(store, number, number % 2 == 0)
                counts.append(remembered.steps.replay_epochs)
            found.append(everything(store))
            assert (max(counts) < 100) == (counts[-1] < 100) == (most < 100)
    assert found[0] == found[1]


@FORGETTING
def test_steps_that_no_row_needs_are_forgotten(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held, made(MemoryStore(1)) as whole, STORES[kind](held, tmp_path) as store:
        assert isinstance(store, MemoryStore)
        monkeypatch.setattr(table_steps, "_FEWEST", 8)
        monkeypatch.setattr(dense_replay, "TableSteps", functools.partial(table_steps.TableSteps, most=MOST))
        remembered = made(store)._tables["t"].replay  # type: ignore[attr-defined]
        for number in range(1, 121):
            step(whole, number)
            step(store, number)
            assert remembered.steps.now - remembered.steps.first < 2 * MOST
        assert remembered.steps.first > 50
        np.testing.assert_allclose(rows(store), rows(whole), rtol=3e-6, atol=1e-7)


def test_evicted_rows_are_rows_that_were_never_updated() -> None:
    with create_tables(MemoryStore(threads=1), table(size=None, eviction=EvictionSpec(max_age=3))) as store:
        ids, ones = np.array([7, 8]), np.ones((2, DIM), np.float32)
        store.commit(Commit(1, {"t": TableUpdate(ids, ones)}, 0, {}))
        for number in range(2, 7):
            store.commit(Commit(number, {"t": TableUpdate(ids[:1], ones[:1])}, number - 1, {}))
        assert store.row_count("t") == 1
        with create_tables(MemoryStore(threads=1), table(size=None)) as other:
            for number in range(1, 7):
                other.commit(Commit(number, {}, number - 1, {}))
            assert np.array_equal(store.lookup({"t": ids})["t"][1], other.lookup({"t": ids})["t"][1])


def test_a_table_state_holds_counts_and_decay() -> None:
    with MemoryStore(threads=1) as store, MemoryStore(threads=1) as other:
        spec = table(size=None, admission=AdmissionSpec(2, 16))
        for one in (store, other):
            one.create_table(spec)
        steps(store, 1, 9)
        state = store.table_state("t")
        assert state.admission_counts is not None
        assert len(state.admission_counts) == 16
        assert state.untouched_decay
        other.put("t", store.scan("t"))
        other.put_table_state("t", state)
        other.reset_version(9)
        assert np.array_equal(rows(store), rows(other))
        assert other.table_state("t") == state
        with pytest.raises(BadInput, match="decayed"):
            other.put_table_state("t", TableState(None, 1e300))
        with pytest.raises(BadInput, match="admission counts"):
            other.put_table_state("t", TableState(np.zeros(3, np.uint8), -3.0))
        assert other.table_state("t") == state


def test_repartition_and_conversion_keep_the_numbers() -> None:
    with MemoryStore(1) as store, PartitionedStore([MemoryStore(1), MemoryStore(1)]) as two, MemoryStore(1) as plain:
        store.create_table(table())
        steps(store, 1, 12)
        repartition(store, two)
        assert np.array_equal(rows(two), rows(store))
        convert_table(two, "t", plain, "float32")
        assert np.array_equal(rows(plain), rows(store))
        with pytest.raises(Unsupported, match="never updated"):
            convert_table(two, "t", MemoryStore(1), "int8")


def test_a_slow_table_steps_when_another_one_is_updated() -> None:
    """`update_tables` commits to one store: every table there counts the step."""
    with MemoryStore(1) as store:
        a, b = (store.table(table(name)) for name in "ab")
        ones = IndexedSlices(np.ones((1, DIM), np.float32), np.array([1]))
        a.update(None, ones)
        before = a.lookup(np.array([1]))
        b.update(None, ones)
        assert not np.array_equal(a.lookup(np.array([1])), before)


@pytest.mark.parametrize("name", sorted(FUSED.keys() - set(known_dense_forms())))
def test_optimizers_without_a_dense_form_are_refused(name: str) -> None:
    with MemoryStore(1) as store, pytest.raises(Unsupported, match=r"no dense-equivalent form.*adam.*rmsprop, .*sgd"):
        store.create_table(table(optimizer=OptimizerSpec.of(name, lazy=False)))


def test_what_cannot_follow_is_refused_by_name() -> None:
    with MemoryStore(1) as memory:
        with pytest.raises(Unsupported, match="'t': lazy=False needs float32"):
            memory.create_table(table(dtype="bfloat16"))
        assert not memory.specs()
        with pytest.raises(BadSpec, match="below 1"):
            memory.create_table(table(optimizer=OptimizerSpec.of("sgd", momentum=1.0, lazy=False)))
        with pytest.raises(BadSpec, match="epsilon"):
            memory.create_table(table(optimizer=OptimizerSpec.of("adam", epsilon=0.0, lazy=False)))
        memory.create_table(table())
        before = rows(memory)
        with pytest.raises(BadInput, match=r"'t': weight_decay 0\.01 times learning rate 1000 is not below 1"):
            memory.commit(Commit(1, {}, 0, {"t": 1000.0}))
        assert memory.version() == 0
        assert np.array_equal(rows(memory), before)


FROZEN = range(5, 9)


@pytest.mark.parametrize("kind", STORES)
def test_commits_that_freeze_a_table_leave_every_bit_of_it(kind: str, tmp_path: Path) -> None:
    with ExitStack() as held, made(STORES[kind](held, tmp_path)) as store, made(MemoryStore(1)) as without:
        version, before = 0, everything(store)
        for number in range(1, 13):
            step(store, number, frozen=number in FROZEN)
            if number in FROZEN:
                assert everything(store) == before
                continue
            version += 1
            without.commit(commit_of(number, version=version))  # the same steps, and no others
            before = everything(store)
            np.testing.assert_allclose(rows(store), rows(without), rtol=1e-6, atol=1e-7)
        if kind in ("memory", "indexed", "file"):
            assert everything(store) == everything(without)


def test_a_table_restored_while_it_is_frozen_goes_on_with_the_same_bits() -> None:
    with made(MemoryStore(1)) as whole, made(MemoryStore(1)) as killed, MemoryStore(1) as restored:
        stores = [whole, killed]
        for number in range(1, 13):
            for store in stores:
                step(store, number, ends=number in (3, 7, 8), frozen=number in FROZEN)
            if number == 7:
                restore(killed, restored, number)
                stores[1] = restored
        assert everything(restored) == everything(whole)


def test_no_row_of_a_frozen_table_is_evicted() -> None:
    with made(MemoryStore(1), table("t", None, OptimizerSpec.of("sgd"), eviction=EvictionSpec(max_age=2))) as store:
        step(store, 1)
        before = store.row_count("t")
        for version in range(2, 9):
            step(store, version, frozen=True)
        assert store.row_count("t") == before > 0
        store.commit(Commit(9, {}, 8, {}))
        assert store.row_count("t") == 0


def test_a_commit_cannot_both_freeze_a_table_and_update_it() -> None:
    with pytest.raises(BadInput, match="says are frozen: 't'"):
        Commit(1, commit_of(1).updates, 0, {}, frozen=("t",))


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


class Replayed(History):
    """Rows are brought to newer replay epochs all the time, and moved between kinds of stores, some of them used."""

    calls = (*History.calls, "nobody_comes", "move", "close_and_open")

    def __init__(self, held: ExitStack, folder: Path) -> None:
        self.held, self.folder, self.made = held, folder, 0
        self.open_again: Callable[[], EmbeddingStore] | None = None
        super().__init__(MemoryStore(1), self.another, but=("byte",))  # which cannot be split by column

    def another(self) -> EmbeddingStore:
        self.made += 1
        kind, folder = list(STORES)[self.made % len(STORES)], self.folder / str(self.made)
        if kind == "file":
            self.open_again = functools.partial(file_store, folder)
        elif kind == "crowded":
            self.open_again = functools.partial(crowded_store, self.held, DictTier(), folder)
        else:
            self.open_again = None
        store = STORES[kind](self.held, folder) if self.open_again is None else self.open_again()
        if self.made % 2:
            create_tables(store, SPECS["every"], SPECS["moments"])
            for version in (1, 2, 3):
                store.commit(history_commit(version, [1, 3], version, ["every", "moments"], version == 2))
        return store

    def nobody_comes(self, random: Random) -> None:
        for _ in range(int(random.integers(2, 40))):
            self.make_commit(history_commit(self.plain.version() + 1, [], 0, []))

    def close_and_open(self, random: Random) -> None:
        if self.open_again is not None:
            self.release()
            self.store.close()
            self.store = self.open_again()


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs(Replayed))
def test_replay_epochs_in_any_history(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    few = functools.partial(table_steps.TableSteps, most=MOST)
    folder = quick_folder()
    with ExitStack() as held, monkeypatch.context() as patch:
        held.callback(shutil.rmtree, folder)
        patch.setattr(dense_replay, "TableSteps", few)
        Replayed(held, folder).play(program)
