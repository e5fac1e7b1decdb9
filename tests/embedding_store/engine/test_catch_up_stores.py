"""Rows that follow every step, in every store that has them: the numbers of one in memory, whatever is done to it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import (
    AdmissionSpec,
    Commit,
    EvictionSpec,
    IndexedSlices,
    MemoryStore,
    OptimizerSpec,
    PartitionedStore,
    RowBlock,
    TableSpec,
    TableUpdate,
    repartition,
)
from elastable.embedding_store.composite.partitioned_store import PlacedStore
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.spec import spec_from_json, spec_to_json
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import dense_replay
from elastable.embedding_store.errors import BadInput, BadSpec, Unsupported
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.optimizers.dense_replay import table_steps
from elastable.embedding_store.tables.conversion import convert_table
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore
from tests.embedding_store.engine.failing_tier import FailingTier
from tests.embedding_store.engine.tiered_stores import crowded_store
from tests.file_stores import file_store

ADAMW = OptimizerSpec.of("adamw", lazy=False, learning_rate=0.01, weight_decay=0.1)
DIM, ROWS = 6, 30
IDS = np.arange(ROWS)
MOST = 64


def table(name: str = "t", size: int | None = ROWS, optimizer: OptimizerSpec = ADAMW, **settings: object) -> TableSpec:
    return TableSpec(name, DIM, size, optimizer=optimizer, **settings)  # type: ignore[arg-type]


def step(store: EmbeddingStore, number: int) -> None:
    """The step to version `number`, of a seeded job: few rows, every fifth time none."""
    random = np.random.default_rng(number)
    ids = random.choice(ROWS - 5, size=0 if number % 5 == 0 else 3, replace=False)
    gradients = random.normal(size=(len(ids), DIM)).astype(np.float32)
    updates = {"t": TableUpdate(ids, gradients)} if len(ids) else {}
    store.commit(Commit(number, updates, number - 1, {"t": 0.01 + 0.005 * np.sin(number)}))


def steps(store: EmbeddingStore, first: int, last: int) -> None:
    for number in range(first, last + 1):
        step(store, number)


def rows(store: EmbeddingStore, version: int | None = None) -> Float32:
    return store.lookup({"t": IDS}, version)["t"]


@pytest.fixture(scope="module")
def expected() -> dict[int, Float32]:
    """What one table in memory holds after each of 120 steps."""
    found = {}
    with MemoryStore(threads=1) as store:
        store.create_table(table())
        for number in range(1, 121):
            step(store, number)
            found[number] = rows(store)
    return found


Make = Callable[[ExitStack, Path], EmbeddingStore]


def served(held: ExitStack, tmp_path: Path) -> EmbeddingStore:
    store = held.enter_context(MemoryStore(threads=1))
    server = held.enter_context(GrpcServer("127.0.0.1:0", [store_service(store, True)], anonymous=Role.ADMINISTRATOR))
    return open_store(f"grpc://{server.address}")


STORES: dict[str, Make] = {
    "memory": lambda held, path: MemoryStore(threads=2),
    "indexed": lambda held, path: MemoryStore(threads=1, direct_bytes=0),
    "file": lambda held, path: file_store(path / "file", 1 << 20, threads=1),
    "crowded": lambda held, path: crowded_store(held, FailingTier(), path / "log"),
    "token": lambda held, path: PartitionedStore([MemoryStore(1), MemoryStore(1), MemoryStore(1)], "token"),
    "encoding": lambda held, path: PartitionedStore([MemoryStore(1), file_store(path / "half", 1 << 20)], "encoding"),
    "placed": lambda held, path: PlacedStore(
        {"memory": MemoryStore(1), "file": file_store(path / "file", 1 << 20)}, {"t": "file"}, "memory"
    ),
    "shared": lambda held, path: SharedMemoryStore(1),
    "remote": served,
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddingStore]:
    with ExitStack() as held, STORES[request.param](held, tmp_path) as made:
        made.create_table(table())
        yield made


def test_every_store_has_the_numbers_of_one_in_memory(store: EmbeddingStore, expected: dict[int, Float32]) -> None:
    for number in range(1, 41):
        step(store, number)
        if number in (1, 20, 21, 40):
            assert np.array_equal(rows(store), expected[number]), number
    block = store.read_rows("t", np.array([3, 0, 17]))
    assert np.array_equal(block.weights, expected[40][[3, 0, 17]])
    assert block.slots.shape == (3, 2 * DIM)
    scanned = list(store.scan("t", 7))
    assert sum(len(some.ids) for some in scanned) == store.row_count("t")
    for some in scanned:
        assert np.array_equal(some.weights, expected[40][some.ids])
    bags = store.table("t").lookup(IDS, combiner="sum", offsets=np.array([0, 10, 10, ROWS]))
    assert np.allclose(bags[[0, 2]], [expected[40][:10].sum(0), expected[40][10:].sum(0)], rtol=1e-5, atol=1e-6)


def test_restored_rows_go_on_from_where_they_were(store: EmbeddingStore, expected: dict[int, Float32]) -> None:
    """Rows count as caught up when they are put, so they are equal to rounding where no replay epoch ended there."""
    with MemoryStore(threads=1) as before:
        before.create_table(table())
        steps(before, 1, 20)
        store.put("t", before.scan("t", 4))
        state = before.table_state("t")
    assert state
    store.put_table_state("t", state)
    store.reset_version(20)
    assert np.array_equal(rows(store), expected[20])
    steps(store, 21, 60)
    assert np.allclose(rows(store), expected[60], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["memory", "indexed", "file", "crowded"])
def test_steps_that_nobody_needs_are_forgotten(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[int, Float32]
) -> None:
    """A row is brought to the present before its last step is forgotten, and pinned versions keep theirs."""
    monkeypatch.setattr(table_steps, "_FEWEST", 8)
    monkeypatch.setattr(dense_replay, "TableSteps", lambda name, form: table_steps.TableSteps(name, form, most=MOST))
    with ExitStack() as held, STORES[kind](held, tmp_path) as store:
        assert isinstance(store, MemoryStore)
        store.create_table(table())
        remembered = store._tables["t"].replay
        assert remembered is not None
        longest = 0
        pin = None
        for number in range(1, 121):
            step(store, number)
            longest = max(longest, remembered.steps.now - remembered.steps.first)
            if number == 30:
                pin = store.pin()
            if number == 75:
                assert pin is not None
                assert np.allclose(pin.lookup({"t": IDS})["t"], expected[30], rtol=1e-6, atol=1e-8)
                pin.close()
        assert remembered.steps.first > 50
        assert longest < 2 * MOST
        assert np.allclose(rows(store), expected[120], rtol=3e-6, atol=1e-7)


def test_evicted_rows_are_rows_that_were_never_updated() -> None:
    with MemoryStore(threads=1) as store:
        store.create_table(table(size=None, eviction=EvictionSpec(max_age=3)))
        ids, ones = np.array([7, 8]), np.ones((2, DIM), np.float32)
        store.commit(Commit(1, {"t": TableUpdate(ids, ones)}, 0, {}))
        for number in range(2, 7):
            store.commit(Commit(number, {"t": TableUpdate(ids[:1], ones[:1])}, number - 1, {}))
        assert store.row_count("t") == 1
        with MemoryStore(threads=1) as other:
            other.create_table(table(size=None))
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


def test_repartition_and_conversion_keep_the_numbers(expected: dict[int, Float32]) -> None:
    with MemoryStore(1) as store, PartitionedStore([MemoryStore(1), MemoryStore(1)]) as two, MemoryStore(1) as plain:
        store.create_table(table())
        steps(store, 1, 12)
        repartition(store, two)
        assert np.array_equal(rows(two), expected[12])
        convert_table(two, "t", plain, "float32")
        assert np.array_equal(rows(plain), expected[12])
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


def test_specs_say_it_everywhere() -> None:
    spec = table()
    assert spec_from_json(spec_to_json(spec)) == spec
    assert "lazy" not in spec_to_json(table(optimizer=OptimizerSpec.of("adam")))
    assert spec != table(optimizer=OptimizerSpec("adamw", ADAMW.hyperparameters))


@pytest.mark.parametrize("name", ["ftrl", "nadam", "lion"])
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
        with pytest.raises(BadInput, match=r"'t': weight_decay 0\.1 times learning rate 10 is not below 1"):
            memory.commit(Commit(1, {}, 0, {"t": 10.0}))
        assert memory.version() == 0
        assert np.array_equal(rows(memory), before)


def test_fresh_rows_are_what_they_are_put_as() -> None:
    with MemoryStore(1) as store:
        store.create_table(table())
        steps(store, 1, 6)
        block = RowBlock(IDS[-2:], np.ones((2, DIM), np.float32), np.zeros((2, 2 * DIM), np.float32))
        store.put("t", [block])
        assert np.array_equal(rows(store)[-2:], block.weights)
