"""Any history of a store: whatever is called in whatever order, it equals a store in memory, and dictionaries."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st

from elastable.embedding_store import (
    AdmissionSpec,
    Commit,
    EmbeddingStore,
    EvictionSpec,
    InitializerSpec,
    MemoryStore,
    OptimizerSpec,
    RowBlock,
    TableSpec,
    TableUpdate,
    coalesce,
    repartition,
)
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    ElastableError,
    FutureVersion,
    IdOutOfRange,
    StaleVersion,
    TableNotFound,
    Unsupported,
)
from elastable.embedding_store.optimizers.registry import row_optimizer
from tests.contracts.store_samples import EXTREMES, MakeStore
from tests.embedding_store.dictionary_model import ModelTable

NORMAL = InitializerSpec("normal", 0, 1)
OF = OptimizerSpec.of
NESTEROV = OF("sgd", lazy=False, momentum=0.8, nesterov=1.0, weight_decay=0.02)
SPECS = {
    spec.name: spec
    for spec in (
        TableSpec("fixed", 3, 14, initializer=NORMAL, optimizer=OF("adam", learning_rate=0.1), seed=1),
        TableSpec("dynamic", 2, initializer=NORMAL, optimizer=OF("adagrad")),
        TableSpec("wild", 5, initializer=NORMAL, optimizer=OF("adam", learning_rate=0.1), seed=2),  # ids: see `WILD`
        TableSpec("narrow", 1, optimizer=OF("sgd", learning_rate=0.5), seed=3),
        TableSpec("rowwise", 6, optimizer=OF("rowwise_adagrad", learning_rate=0.5), seed=4),
        TableSpec("half", 2, None, "bfloat16", NORMAL, 4, OF("adam")),
        TableSpec("block", 5, None, "float16", NORMAL, 4, OptimizerSpec("contract_block", ())),
        TableSpec("byte", 4, None, "int8", NORMAL, 4, OF("adagrad")),
        TableSpec("rare", 2, admission=AdmissionSpec(2, 1 << 12), eviction=EvictionSpec(max_age=2, every=2)),
        TableSpec("often", 2, optimizer=OF("adam"), eviction=EvictionSpec(min_frequency=2, every=3)),
        TableSpec("both", 1, admission=AdmissionSpec(3, 1 << 12), eviction=EvictionSpec(2, 2, every=2)),
        TableSpec("every", 2, optimizer=OF("adam", lazy=False), initializer=NORMAL),
        TableSpec("decayed", 2, 14, optimizer=OF("adamw", weight_decay=0.1, lazy=False), seed=3),
        TableSpec("moments", 3, 14, initializer=NORMAL, optimizer=OF("rmsprop", lazy=False)),
        TableSpec("nesterov", 2, optimizer=NESTEROV, eviction=EvictionSpec(max_age=4, every=3)),
        TableSpec("admitted", 2, admission=AdmissionSpec(2, 1 << 12)),
        TableSpec("few", 1, eviction=EvictionSpec(max_rows=5)),
        TableSpec("timed", 2, optimizer=OF("adagrad"), eviction=EvictionSpec(ttl=1.0, every=2)),
    )
}
NAMES = sorted(SPECS)
TRAINED = [name for name in NAMES if name != "byte"]  # int8 rows are put, and read
MOST = 13
WILD = np.array([*EXTREMES, -(2**63) + 1, 1, -7, -(2**31) - 1, 2**31, 2**32, 2**62, 5, 10**15, -(10**15)], np.int64)
Random = np.random.Generator
Program = list[tuple[str, int]]
"""Calls of a history by name, each with the seed of what it draws."""


def ids_of(name: str, numbers: Sequence[int] | Int64) -> Int64:
    """The ids of a table that numbers 0 to 13 stand for."""
    given = np.array(numbers, np.int64)
    return WILD[given] if name == "wild" else given


def spoiled(name: str, **changed: object) -> Callable[[Commit], Commit]:
    """Spoils the update of a table."""

    def spoil(commit: Commit) -> Commit:
        update = commit.updates.get(name) or TableUpdate(np.arange(2), np.ones((2, SPECS[name].dim), np.float32))
        return replace(commit, updates={**commit.updates, name: replace(update, **changed)})  # type: ignore[arg-type]

    return spoil


def _rate(name: str, rate: float) -> Callable[[Commit], Commit]:
    return lambda commit: replace(commit, learning_rates={name: rate}, frozen=())


ONES = np.ones((2, 2), np.float32)
HOSTILE: dict[str, tuple[Callable[[Commit], Commit], type[ElastableError]]] = {
    "past version": (lambda commit: replace(commit, version=commit.version - 1), StaleVersion),
    "version to come": (lambda commit: replace(commit, version=commit.version + 1), FutureVersion),
    "step below 0": (lambda commit: replace(commit, step=-1), BadInput),
    "rate NaN": (_rate("dynamic", np.nan), BadInput),
    "rate of a table that follows": (_rate("moments", 1e300), BadInput),
    "decay of exactly all": (_rate("decayed", 10.00001), BadInput),
    "ids of a wrong kind": (spoiled("dynamic", ids=np.ones(2, np.float32), gradients=ONES), BadIds),
    "ids of two dimensions": (spoiled("dynamic", ids=np.ones((2, 1), np.int64), gradients=ONES), BadIds),
    "outside": (spoiled("decayed", ids=np.array([1, 14]), gradients=ONES), IdOutOfRange),
    "negative id": (spoiled("decayed", ids=np.array([-1, 1]), gradients=ONES), IdOutOfRange),
    "wider": (spoiled("dynamic", ids=np.arange(2), gradients=np.ones((2, 3), np.float32)), BadGradient),
    "no columns": (spoiled("dynamic", ids=np.arange(2), gradients=np.ones((2, 0), np.float32)), BadGradient),
    "fewer rows": (spoiled("dynamic", ids=np.arange(3), gradients=ONES), BadGradient),
    "float64": (spoiled("dynamic", ids=np.arange(2), gradients=ONES.astype(float)), BadGradient),
    "flat": (spoiled("dynamic", ids=np.arange(2), gradients=np.ones(4, np.float32)), BadGradient),
    "no such table": (
        lambda commit: replace(commit, updates={**commit.updates, "none": TableUpdate(np.arange(2), ONES)}),
        TableNotFound,
    ),
}
"""Commits that every store refuses with an error; then they have changed nothing."""

Table = tuple[dict[int, tuple[bytes, ...]], bytes, TableState]


def table_of(source: Snapshot, name: str) -> Table:
    """Every bit of a table: rows with slots and touches, what lookups give, and what it keeps besides."""
    rows: dict[int, tuple[bytes, ...]] = {}
    most = 100 if name == "narrow" else 7
    for block in source.scan(name, most):
        assert 0 < len(block.ids) <= most
        assert not rows.keys() & set(block.ids.tolist())
        rows |= rows_of(block)
    assert source.row_count(name) == len(rows)
    ids = ids_of(name, np.arange(MOST + 1))
    read = rows_of(source.read_rows(name, ids))
    assert list(read.items()) == [(one, rows[one]) for one in ids.tolist() if one in rows]
    return rows, source.lookup({name: ids})[name].tobytes(), source.table_state(name)


def rows_of(block: RowBlock) -> dict[int, tuple[bytes, ...]]:
    """Weights, slots and touches by id."""
    touches = block.touches if block.touches is not None else np.empty((len(block.ids), 0))
    parts = zip(block.weights, block.slots, touches, strict=True)
    return dict(zip(block.ids.tolist(), (tuple(map(np.ndarray.tobytes, part)) for part in parts), strict=True))


def everything(source: Snapshot) -> dict[str, object]:
    names = sorted(source.specs())
    return {"version": source.version(), **{name: table_of(source, name) for name in names}}


def commit_of(version: int, numbers: Sequence[int], seed: int, names: Collection[str], ends: bool = False) -> Commit:
    """The commit of a version; numbers may repeat, and some commits come from a clock that is behind."""
    random, updates = np.random.default_rng(seed), {}
    for name in names:
        gradients = random.normal(size=(len(numbers), SPECS[name].dim)).astype(np.float32)
        updates[name] = coalesce(ids_of(name, numbers), gradients)
    rates = dict.fromkeys(names, 0.01 * (1 + seed % 4))
    frozen = tuple({"every", "half"}.difference(names)) if seed % 4 == 1 else ()
    now = 1000 + 0.4 * version + 0.25 * (seed % 7) + 1e-5
    return Commit(version, updates, version - 1, rates, None, ends, frozen, now)


class History:
    """A store and one in memory see the same calls. Subclasses may disturb the store, and only the store.

    Attributes:
        make: Makes an empty store, also to move all rows to; None: rows are moved nowhere.
        but: Tables that are left out.
        made: Whether the store has the tables already.
        calls: Names of the methods that make up a history. Each draws what it needs.
        hostile: Commits that are refused.
        models: The tables that a dictionary is kept for, too.
    """

    hostile: ClassVar = HOSTILE
    calls: tuple[str, ...] = (
        *("commit", "commit", "commit_to_all", "look_up", "delete", "put", "put", "put_state", "clear", "drop"),
        *("pin", "pin", "pin_again", "unpin", "nest_pins", "scan_a_pin_while_rows_change", "move", "grow", "refuse"),
    )

    def __init__(
        self,
        store: EmbeddingStore,
        make: Callable[[], EmbeddingStore] | None = None,
        but: Collection[str] = (),
        made: bool = False,
    ) -> None:
        self.store, self.make = store, make
        self.plain = MemoryStore(1, direct_bytes=100)
        self.models: dict[str, ModelTable] = {}
        self.pins: list[tuple[Snapshot, dict[str, Table]]] = []
        self.now_ms = self.grown = 0
        for name in SPECS.keys() - but:
            spec = SPECS[name]
            try:
                assert self.store.create_table(spec) is not made
            except Unsupported:  # as int8 rows where no column stands alone
                continue
            self.plain.create_table(spec)
            bounded = spec.eviction is not None and spec.eviction.max_rows is not None
            if spec.dtype == "float32" and spec.optimizer.lazy and not bounded:
                self.models[name] = ModelTable(spec)
        self.names = sorted(self.plain.specs())
        assert self.store.specs() == self.plain.specs()
        self.trained = [name for name in self.names if name != "byte"]

    def play(self, program: Program) -> None:
        """Makes the calls, compares a table after each and all at the end, and closes the stores."""
        for at, (call, seed) in enumerate(program):
            try:
                getattr(self, call)(np.random.default_rng(seed))
                self.settle()
                assert self.store.version() == self.plain.version()
                self.compare([self.names[at % len(self.names)]])
            except Exception as error:
                raise AssertionError(f"after {program[: at + 1]}") from error
        self.compare(self.names)
        self.close()

    def settle(self) -> None:
        """Waits for what goes on behind."""

    def close(self) -> None:
        self.release()
        assert self.store.pins() == ()
        self.store.close()
        self.plain.close()

    def numbers(self, random: Random, most: int = 8, unique: bool = False) -> list[int]:
        count = int(random.integers(1, most + 1))
        drawn: list[int] = random.choice(MOST + 1, count, replace=not unique).tolist()
        return drawn

    def table(self, random: Random) -> str:
        return str(random.choice(self.names))

    def both(self, call: Callable[[EmbeddingStore], object]) -> None:
        assert call(self.store) == call(self.plain)

    def unless_pinned(self, random: Random, call: Callable[[EmbeddingStore], object]) -> bool:
        """Makes a call that is refused while there are pins; in most cases there are none any more."""
        if random.random() < 0.7:
            self.release()
        if self.pins:
            with pytest.raises(BadInput, match="pinned"):
                call(self.store)
            return False
        self.both(call)
        return True

    def make_commit(self, commit: Commit) -> None:
        for store in (self.store, self.plain):
            store.commit(commit)
        assert commit.time is not None
        self.now_ms = int(commit.time * 1000)
        for name, model in self.models.items():
            if name in commit.updates:
                update, rate = commit.updates[name], commit.learning_rates.get(name)
                pairs = list(zip(update.ids.tolist(), update.gradients, strict=True))
                model.commit(commit.version, pairs, commit.step, rate)
            model.evict(commit.version, self.now_ms)

    def commit(self, random: Random) -> None:
        names, seed = random.choice(self.trained, random.integers(0, 5), replace=False), int(random.integers(1 << 20))
        self.make_commit(commit_of(self.plain.version() + 1, self.numbers(random), seed, names.tolist()))

    def commit_to_all(self, random: Random) -> None:
        seed = int(random.integers(1 << 20))
        version, numbers = self.plain.version() + 1, self.numbers(random, unique=True)
        self.make_commit(commit_of(version, numbers, seed, self.trained, ends=seed % 3 == 0))

    def refuse(self, random: Random) -> None:
        """A commit is whole or nothing of it is there; a retry finds what the first attempt left."""
        if not self.plain.version():
            self.commit_to_all(random)
        names = {"dynamic", "admitted", "decayed", *random.choice(self.trained, 3).tolist()} - {"rowwise"}
        good = commit_of(self.plain.version() + 1, self.numbers(random), int(random.integers(1 << 20)), names)
        for what, (spoil, error) in self.hostile.items():
            staged = random.random() < 0.5
            for _ in range(2):
                with pytest.raises(error):
                    self.store.stage(spoil(good))() if staged else self.store.commit(spoil(good))
                assert self.store.version() == self.plain.version(), what
        self.compare(self.names)
        self.make_commit(good)

    def grow(self, random: Random) -> None:
        if self.grown < 2:
            self.grown += 1
            ids, version = np.unique(random.integers(-(2**40), 2**40, 700)), self.plain.version()
            update = TableUpdate(ids, np.ones((len(ids), 1), np.float32))
            self.make_commit(Commit(version + 1, {"narrow": update}, version, {}, time=self.now_ms / 1000 + 1e-5))

    def look_up(self, random: Random) -> None:
        numbers = self.numbers(random, 20)
        ids = {name: ids_of(name, numbers) for name in {self.table(random) for _ in range(3)}}
        version = self.plain.version() if random.random() < 0.5 else None
        found, expected = self.store.lookup(ids, version), self.plain.lookup(ids)
        assert list(found) == list(ids)
        for name, rows in found.items():
            np.testing.assert_array_equal(rows, expected[name])
            if name in self.models:
                np.testing.assert_array_equal(rows, [self.models[name].read(one) for one in ids[name].tolist()])

    def delete(self, random: Random, name: str = "") -> None:
        name = name or self.table(random)
        ids = ids_of(name, self.numbers(random))
        self.both(lambda store: store.delete(name, ids))
        if name in self.models:
            for one in ids.tolist():
                self.models[name].delete(one)

    def put(self, random: Random) -> None:
        evicting = [name for name in self.names if SPECS[name].eviction is not None]
        name = self.table(random) if random.random() < 0.5 else str(random.choice(evicting))
        spec, ids, version = SPECS[name], ids_of(name, self.numbers(random, unique=True)), self.plain.version()
        weights = random.normal(size=(len(ids), spec.dim)).astype(np.float32)
        slots = random.random((len(ids), row_optimizer(spec.optimizer).slot_width(spec.dim))).astype(np.float32)
        touches = None
        if spec.eviction is not None and random.random() < 0.7:
            touches = np.stack([random.integers(0, version + 1, len(ids)), random.integers(0, 3, len(ids))], axis=1)
        self.both(lambda store: store.put(name, [RowBlock(ids, weights, slots, touches)]))
        if name == "timed":
            self.models.pop(name, None)  # it does not know when those versions were
        elif name in self.models:
            self.models[name].put(RowBlock(ids, weights, slots, touches))

    def put_state(self, random: Random) -> None:
        counts = random.integers(0, 3, 1 << 12).astype(np.uint8)
        self.both(lambda store: store.put_table_state("admitted", TableState(counts)))
        self.models.pop("admitted", None)

    def clear(self, random: Random) -> None:
        name = self.table(random)
        if self.unless_pinned(random, lambda store: store.clear(name)) and name in self.models:
            self.models[name].clear()

    def drop(self, random: Random) -> None:
        name = self.table(random)
        if self.unless_pinned(random, lambda store: store.drop_table(name)):
            self.both(lambda store: store.create_table(SPECS[name]))
            if name in self.models:
                self.models[name] = ModelTable(SPECS[name])

    def pin(self, random: Random) -> None:
        if len(self.pins) < 3:
            # Rows that were deleted since a version was pinned first are there for whoever pins it again.
            same = [expected for pin, expected in self.pins if pin.version() == self.plain.version()]
            expected = same[0] if same else {name: table_of(self.plain, name) for name in self.names}
            self.pins.append((self.store.pin(), expected))

    def pin_again(self, random: Random) -> None:
        if 0 < len(self.pins) < 3:
            pin, expected = self.pins[0]
            self.pins.append((self.store.pin(pin.version()), expected))

    def unpin(self, random: Random) -> None:
        if self.pins:
            pin, _ = self.pins.pop(int(random.integers(len(self.pins))))
            pin.close()
            with pytest.raises(StaleVersion):
                pin.row_count("dynamic")
            self.compare(self.names)  # what only this one had is there for those before it

    def nest_pins(self, random: Random) -> None:
        self.release()
        for _ in range(3):
            self.pin(random)
            self.commit_to_all(random)
        for _ in range(2):
            self.unpin(random)

    def scan_a_pin_while_rows_change(self, random: Random) -> None:
        if self.pins:
            name, (pin, expected) = self.table(random), self.pins[int(random.integers(len(self.pins)))]
            found = list[int]()
            for number, block in enumerate(pin.scan(name, int(random.integers(2, 5)))):
                found += block.ids.tolist()
                assert rows_of(block).items() <= expected[name][0].items()
                if number < 3:
                    self.commit_to_all(random)
                    self.delete(random, name)
            assert sorted(found) == sorted(expected[name][0])

    def move(self, random: Random) -> None:
        """As a checkpoint is restored: from the end of a replay epoch all tables go on with the same bits."""
        if self.make is not None:
            self.release()
            self.make_commit(commit_of(self.plain.version() + 1, [1, 2], 0, self.trained, ends=True))
            target = self.make()
            copied = repartition(self.store, target, replace=True)
            assert copied == {name: self.plain.row_count(name) for name in self.names}
            self.store.close()
            self.store = target

    def compare(self, names: Sequence[str]) -> None:
        for name in names:
            expected = table_of(self.plain, name)
            assert table_of(self.store, name) == expected, name
            if name in self.models:
                assert {one: row[:2] for one, row in expected[0].items()} == self.models[name].bytes_by_id(), name
        assert [pin.version for pin in self.store.pins()] == sorted(pin.version() for pin, _ in self.pins)
        for pin, tables in self.pins:
            for name in names:
                assert table_of(pin, name) == tables[name], f"{name} at {pin.version()}"
                if pin.version() != self.plain.version():
                    ids = ids_of(name, np.arange(MOST + 1))
                    assert self.store.lookup({name: ids}, pin.version())[name].tobytes() == tables[name][1]

    def release(self) -> None:
        for pin, _ in self.pins:
            pin.close()
        self.pins.clear()


def programs(kind: type[History] = History, most: int = 30) -> st.SearchStrategy[Program]:
    call = st.tuples(st.sampled_from(kind.calls), st.integers(0, 1 << 20))
    return st.integers(5, most).flatmap(lambda count: st.lists(call, min_size=count, max_size=count))


def program(kind: type[History], seed: int, times: int = 2) -> Program:
    """Each call so many times or more, in any order."""
    random = np.random.default_rng(seed)
    drawn = [(call, int(random.integers(1 << 20))) for call in kind.calls * times]
    return [drawn[at] for at in random.permutation(len(drawn))]


class HistoryContract:
    history: type[History] = History
    times = 2

    def test_any_history_is_that_of_a_store_in_memory(self, make_store: MakeStore) -> None:
        seed = np.random.randint(1 << 30)  # of this test, and another one where the tests are given one
        self.history(make_store(), make_store).play(program(self.history, seed, self.times))
