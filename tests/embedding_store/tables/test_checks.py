from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store import Bags, IndexedSlices, MemoryStore, PartitionedStore, RemoteStore, update_many
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, BadInput, BadSpec, NotFinite
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.checks import as_ids, require_block, require_finite_of, require_ids
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from tests.contracts.store_samples import create_tables
from tests.embedding_store.serving import client_service

FIXED = TableSpec("cities", 3, 10)
DYNAMIC = TableSpec("people", 3)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_integers_become_ids(dtype: type) -> None:
    ids = as_ids(np.array([[1, 2], [3, 100]], dtype))
    assert (ids.dtype, ids.tolist()) == (np.int64, [[1, 2], [3, 100]])


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 11), (np.float32, 24), (np.float64, 53), (np.longdouble, 62)])
def test_floats_that_are_integers_become_ids(dtype: type, bits: int) -> None:
    largest = 2**bits - 1 if bits < 53 else 2**53 - 1
    assert as_ids(np.array([[1, 0], [-largest, largest]], dtype)).tolist() == [[1, 0], [-largest, largest]]
    assert as_ids(np.zeros((0, 2), dtype)).shape == (0, 2)


def test_ids_are_copied_where_they_must_be() -> None:
    ids = np.arange(10)
    assert as_ids(ids) is ids
    assert require_ids(FIXED, ids[::3]).flags.c_contiguous
    assert as_ids([3, -4]).tolist() == [3, -4]
    assert as_ids([]).dtype == np.int64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1.0, 2.5]), r"table 'cities': id 2.5 is no integer \(position 1\)"),
        (np.array([1.0, np.nan]), r"id nan is no integer: fill or drop it.*null.*\(position 1\)"),
        ([1.0, np.inf], "id inf is no integer"),
        (
            np.array([2**24], np.float32),
            r"id 16777216 may have been rounded: float32 .* below 2\*\*24; give ids as int64",
        ),
        (np.array([2.0**53]), r"id 9007199254740992 may have been rounded: float64 .* below 2\*\*53"),
        (np.array([2048], np.float16), r"id 2048 may have been rounded: float16 .* below 2\*\*11"),
        ([1, None], "got None, a NoneType, at position 1"),
        ([2**64], "got 18446744073709551616, a int, at position 0"),
        (np.ma.masked_array([1, 2], [False, True]), "ids: the value at position 1 is masked"),
        (np.array([True]), "bool"),
        (np.array(["a"]), "<U1"),
        (np.array([3, 2**63], np.uint64), "id 9223372036854775808 at position 1"),
    ],
)
def test_what_is_no_id(values: np.ndarray, message: str) -> None:
    with pytest.raises(BadIds, match=message):
        as_ids(values, "cities")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (4, 1), (6, 2)])
def test_values_that_are_not_finite(value: float, row: int, column: int) -> None:
    ids, gradients = np.arange(7) + 100, np.full((7, 3), 3e38, np.float32)
    require_finite_of("people", ids, gradients)
    gradients[row, column] = value
    with pytest.raises(NotFinite, match=rf"'people'.*id {row + 100} \(position {row}\) is {value} in column {column}"):
        require_finite_of("people", ids, gradients)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("name", FUSED)
def test_slots_that_no_step_can_leave(name: str, value: float) -> None:
    optimizer, begin = row_optimizer(OptimizerSpec.of(name)), 0
    for slot in optimizer.slots:
        slots = np.ones((2, optimizer.slot_width(3)), np.float32)
        slots[1, begin] = value
        block = RowBlock(np.arange(2), np.ones((2, 3), np.float32), slots)
        for given in (block, replace(block, trained=True)):  # training may make a slot infinite or NaN
            error = NotFinite if not given.trained and not np.isfinite(value) else None
            if error or (slot.squares and value < 0):
                message = f"slot '{slot.name}' of id 1 \\(position 1\\) is {value} in column 0"
                with pytest.raises(error or BadInput, match=message):
                    require_block(FIXED, optimizer, given)
            else:
                require_block(FIXED, optimizer, given)
        begin += slot.columns or 3


def test_what_a_program_puts_is_finite_wherever_it_comes_from() -> None:
    with create_tables(MemoryStore(threads=1), TableSpec("t", 2)) as store:
        block = RowBlock(np.array([4]), np.full((1, 2), np.inf, np.float32), np.empty((1, 0), np.float32), trained=True)
        store.put("t", [block])
        with pytest.raises(NotFinite, match="'t'"):
            EmbeddingTable(store, "t").put(store.scan("t"))


SPEC = TableSpec("items", 2, 100, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
ONE, ONES = np.array([1]), np.ones((1, 2), np.float32)


@pytest.fixture(scope="module", params=["memory", "served", "partitioned"])
def table(request: pytest.FixtureRequest) -> Iterator[EmbeddingTable]:
    with ExitStack() as held:
        memory: EmbeddingStore = held.enter_context(MemoryStore(1))
        if request.param == "partitioned":
            memory = held.enter_context(PartitionedStore([memory, held.enter_context(MemoryStore(1))], "token"))
        if request.param == "served":
            service = client_service(memory)
            server = held.enter_context(GrpcServer("127.0.0.1:0", [service], anonymous=Role.ADMINISTRATOR))
            memory = held.enter_context(RemoteStore(server.address, 30.0))
        yield memory.table(SPEC)


def gradient(*values: float, ids: object = ONE) -> IndexedSlices:
    return IndexedSlices(np.repeat(np.array(values, np.float32)[:, np.newaxis], 2, axis=1), np.asarray(ids))


def with_rate(rate: object) -> OptimizerSpec:
    return OptimizerSpec.of("adagrad", learning_rate=rate)  # type: ignore[arg-type]


def committed(table: EmbeddingTable, step: object = 0, **rates: object) -> None:
    table.store.commit(Commit(table.store.version() + 1, {"items": TableUpdate(ONE, ONES)}, step, rates))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[EmbeddingTable], object], type[Exception], str]] = {
    "NaN in one of many": (lambda t: update_many([t], None, [gradient(np.nan)]), NotFinite, "id 1 .*nan"),
    "a rate of NaN": (lambda t: t.update(with_rate(np.nan), gradient(1)), BadSpec, "learning_rate.*nan"),
    "a rate above float32": (lambda t: t.update(with_rate(1e39), gradient(1)), BadSpec, r"float32, got 1e\+39"),
    "a rate that is text": (lambda t: t.update(with_rate("0.1"), gradient(1)), BadSpec, "number, got '0.1'"),
    "no rate": (lambda t: t.update(with_rate(None), gradient(1)), BadSpec, "learning_rate must be a number, got None"),
    "a commit with a rate of NaN": (lambda t: committed(t, items=np.nan), BadInput, "'items'.*nan"),
    "a commit with text as a rate": (lambda t: committed(t, items="0.1"), BadInput, "'items'.*'0.1'"),
    "a step of NaN": (lambda t: t.update(None, gradient(1), step=np.nan), BadInput, "step.*nan"),  # type: ignore[arg-type]
    "a step below 0": (lambda t: t.update(None, gradient(1), step=-1), BadInput, "step.*-1"),
    "a lookup with a fraction": (lambda t: t.lookup([1.5]), BadIds, "1.5"),
    "bags with a fraction": (lambda t: t.lookup(np.array([[1.5]]), combiner="sum"), BadIds, "1.5"),
    "a lookup of NaN": (lambda t: t.lookup([1.0, np.nan]), BadIds, "nan is no integer: fill or drop"),
    "a deletion with a fraction": (lambda t: t.delete([1.5]), BadIds, "1.5"),
    "a gradient of bags with a fraction": (lambda t: t.lookup_gradient([1.5], ONES), BadIds, "1.5"),
    "a combiner": (lambda t: t.lookup(Bags(np.array([[1]]), "max")), BadInput, "'max'.*sum, mean, sqrtn"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(table: EmbeddingTable, what: str) -> None:
    call, error, message = REFUSED[what]
    before, version = table.lookup(np.arange(100)), table.store.version()
    with pytest.raises(error, match=message):
        call(table)
    assert table.store.version() == version
    np.testing.assert_array_equal(table.lookup(np.arange(100)), before)


def test_nothing_of_several_stores_is_changed() -> None:
    with MemoryStore(1) as first, MemoryStore(1) as second:
        tables = [store.table(SPEC) for store in (first, second)]
        with pytest.raises(NotFinite):
            update_many(tables, None, [gradient(1), gradient(np.nan)])
        assert first.version() == second.version() == 0
