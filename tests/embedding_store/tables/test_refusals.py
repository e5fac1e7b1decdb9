"""What the documentation says is refused, on every face of a table: in memory, over gRPC, partitioned."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from elastable.embedding_store import Bags, IndexedSlices, MemoryStore, PartitionedStore, RemoteStore, update_many
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, BadInput, BadSpec, NotFinite
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service

SPEC = TableSpec("items", 2, 100, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
ONE, ONES = np.array([1]), np.ones((1, 2), np.float32)


@pytest.fixture(scope="module", params=["memory", "served", "partitioned"])
def table(request: pytest.FixtureRequest) -> Iterator[EmbeddingTable]:
    with ExitStack() as held:
        memory: EmbeddingStore = held.enter_context(MemoryStore(1))
        if request.param == "partitioned":
            memory = held.enter_context(PartitionedStore([memory, held.enter_context(MemoryStore(1))], "token"))
        if request.param == "served":
            service = store_service(memory, writable=True)
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
