"""What clients of a parameter server send that cannot be: refused by name, and nothing of it is kept."""

import re
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from elastable.embedding_store import EvictionSpec, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.channels.server_connection import channel
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from tests.contracts.store_samples import rows_by_id
from tests.embedding_store.serving import client_service

Send = Callable[[store_pb2_grpc.StoreStub], object]
NAN = float("nan")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[MemoryStore, str]]:
    """As `elastable serve` has it."""
    with MemoryStore(1) as store, GrpcServer("127.0.0.1:0", [client_service(store)]) as server:
        optimizer = OptimizerSpec.of("adagrad", learning_rate=0.5)
        store.create_table(TableSpec("t", 2, optimizer=optimizer, eviction=EvictionSpec(ttl=60.0)))
        yield store, server.address


def push(ids: list[int], values: list[float], sequence: int = 1, table: str = "t", **terms: object) -> Send:
    header = store_pb2.RowPushHeader(sender="hostile", micro_batch=sequence, terms=store_pb2.PushTerms(**terms))  # type: ignore[arg-type]
    header.parts.add().slices.add(table=table, count=len(ids), dim=2)
    body = np.array(ids, "<i8").tobytes() + np.repeat(np.array(values, "<f4"), 2).tobytes()
    frame = store_pb2.RowPushFrame(header=header, body=body)
    return lambda stub: stub.PushRows(iter([frame]), timeout=60)


def block(ids: list[int], weight: float, slot: float = 1.0, trained: bool = False) -> store_pb2.RowBlockFrame:
    header = store_pb2.RowBlockHeader(table="t", count=len(ids), dim=2, slot_width=2, trained=trained)
    values = np.full(2 * len(ids), weight, "<f4").tobytes() + np.full(2 * len(ids), slot, "<f4").tobytes()
    return store_pb2.RowBlockFrame(header=header, body=np.array(ids, "<i8").tobytes() + values)


def put(*frames: store_pb2.RowBlockFrame) -> Send:
    return lambda stub: stub.Put(iter(frames), timeout=60)


def times(last: int) -> store_pb2.RowBlockFrame:
    header = store_pb2.RowBlockHeader(table="t", state=store_pb2.TableState(spans=1))
    return store_pb2.RowBlockFrame(header=header, body=np.array([1, 1000, last], "<i8").tobytes())


def create(**spec: object) -> Send:
    whole = {"name": "new", "dim": 2, "optimizer": store_pb2.Optimizer(name="sgd"), **spec}
    request = store_pb2.CreateTableRequest(spec=store_pb2.TableSpec(**whole))  # type: ignore[arg-type]
    return lambda stub: stub.CreateTable(request, timeout=60)


def sgd(**fields: object) -> Send:
    return create(optimizer=store_pb2.Optimizer(name="sgd", **fields))  # type: ignore[arg-type]


def look_up(*tables: str) -> Send:
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table=table, count=1) for table in tables])
    request = store_pb2.LookupRequest(header=header, body=np.ones(len(tables), "<i8").tobytes())
    return lambda stub: stub.LookupSmall(request, timeout=60)


REFUSED: dict[str, tuple[Send, str]] = {
    "a table that is looked up twice": (look_up("t", "t"), "BadInput: LookupRequest: a table is in it twice"),
    "rates of a table that is none": (push([1], [1], learning_rates={"u": 0.1}), "TableNotFound: terms of table 'u'"),
    "a frozen table that is none": (push([1], [1], frozen=["u"]), "TableNotFound: terms of table 'u'"),
    "a push for a table that is none": (push([1], [1], table="u"), "TableNotFound: gradient for table 'u'"),
    "a rate": (push([1], [1], learning_rates={"t": NAN}), "BadInput: .* learning rate of table 't'"),
    "a time that is far ahead": (push([1], [1], time=2.0**39), "BadInput: .* ahead of the clock of this server"),
    "a gradient": (push([1], [NAN]), "NotFinite: table 't': the gradient of id 1"),
    "a sum": (push([1, 1], [3e38, 3e38]), "NotFinite: table 't'"),
    "an id that comes twice": (push([1, 1], [1, 1], summed=True), "BadIds: .* id 1 appears at positions 0 and 1"),
    "a sequence far ahead": (push([1], [1], 2**52), "BadInput: push 4503599627370496 of 'hostile', whose last"),
    "a weight": (put(block([1], NAN)), "NotFinite: table 't': the weight of id 1"),
    "a slot": (put(block([1], 1, NAN)), "NotFinite: table 't': the slot 'accumulator' of id 1"),
    "a weight that training is said to have made": (
        put(block([1], -float("inf"), trained=True)),
        "NotFinite: table 't': the weight of id 1",
    ),
    "a slot that training is said to have made": (
        put(block([1], 1, -1, trained=True)),
        "BadInput: table 't': the slot 'accumulator' of id 1 .* is -1.0",
    ),
    "times that are far ahead": (put(times(2**60)), "BadInput: Put: touch times of table 't': .* ahead of the clock"),
    "an id that is put twice": (put(block([1, 1], 1)), "BadIds: table 't': id 1 appears at positions 0 and 1"),
    "one in two blocks": (put(block([1], 1), block([1], 2)), "BadInput: Put: one block"),
    "a good block and a bad one": (put(block([1], 1), block([2], NAN)), "BadInput: Put: one block"),
    "no block": (put(), "BadInput: Put: one block"),
    "an optimizer": (create(optimizer=store_pb2.Optimizer(name="u")), "BadSpec: unknown optimizer 'u'"),
    "no optimizer": (create(optimizer=store_pb2.Optimizer()), "BadSpec: table 'new': its optimizer has no name"),
    "a hyperparameter": (sgd(hyperparameters={"u": 1.0}), "BadSpec: optimizer 'sgd': unknown hyperparameter 'u'"),
    "a hyperparameter's value": (
        sgd(hyperparameters={"learning_rate": NAN}),
        "BadSpec: .*: learning_rate",
    ),
    "a config of another optimizer": (sgd(keras_config="{}"), "BadSpec: optimizer 'sgd' has .* no keras_config"),
    "an initializer": (create(initializer=store_pb2.Initializer(kind="u")), "BadSpec: initializer kind 'u'"),
    "an initial value beyond float32": (
        create(initializer=store_pb2.Initializer(kind="constant", a=1e39)),
        "BadSpec: initializer constant: .* float32, got a=1e\\+39",
    ),
    "initial values beyond float32": (
        create(initializer=store_pb2.Initializer(kind="uniform", a=-1e308, b=1e308)),
        "BadSpec: initializer uniform: .* float32, got a=-1e\\+308, b=1e\\+308",
    ),
    "a dtype": (create(dtype="u"), "BadSpec: table 'new': dtype 'u'"),
    "a kind of ids": (create(ids="u"), "BadSpec: table 'new': ids 'u'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_name_and_changes_nothing(served: tuple[MemoryStore, str], what: str) -> None:
    (store, address), (send, said) = served, REFUSED[what]
    with channel(address) as opened:
        stub = store_pb2_grpc.StoreStub(opened)
        with pytest.raises(grpc.RpcError) as caught:
            send(stub)
        assert isinstance(caught.value, grpc.Call)
        error = f"{dict(caught.value.trailing_metadata() or ())[ERROR_KEY]}: {caught.value.details()}"
        assert re.match(said, error), error
    assert (store.version(), rows_by_id(store, "t"), list(store.specs())) == (0, {}, ["t"])
