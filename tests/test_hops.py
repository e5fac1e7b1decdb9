"""How many functions and files of ours a lookup, an update and a fit pass through: what somebody reads who follows."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store import (
    EmbeddingStore,
    EmbeddingTable,
    IndexedSlices,
    MemoryStore,
    OptimizerSpec,
    RemoteStore,
    TableSpec,
)
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from tests.embedding_store.serving import client_service

ROOT = str(Path(__file__).parents[1])
IDS = np.arange(100)
SLICES = IndexedSlices(np.ones((100, 8), np.float32), IDS)
CALLS: dict[str, Callable[[EmbeddingTable], object]] = {
    "lookup": lambda table: table.lookup(IDS),
    "update": lambda table: table.update(None, SLICES),
}
MOST = {
    ("memory", "lookup"): (25, 8),
    ("memory", "update"): (50, 15),
    ("gRPC", "lookup"): (25, 8),
    ("gRPC", "update"): (25, 10),
}


@contextmanager
def passed() -> Iterator[set[tuple[str, str, int]]]:
    """Files, names and lines of the functions of ours that this thread, and those it starts, call in the block."""
    seen: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and "/tests/" not in code.co_filename:
            seen.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


@pytest.mark.parametrize(("where", "call"), MOST)
def test_a_call_passes_few_functions(where: str, call: str) -> None:
    with ExitStack() as held:
        store: EmbeddingStore = held.enter_context(MemoryStore(1))
        if where == "gRPC":
            server = held.enter_context(GrpcServer("127.0.0.1:0", [client_service(store)]))
            store = held.enter_context(RemoteStore(server.address))
        table = store.table(TableSpec("t", 8, 1000, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1)))
        for _ in range(2):  # what is made at first is there then
            for each in CALLS.values():
                each(table)
        with passed() as seen:
            CALLS[call](table)
    require_few(seen, *MOST[where, call])


def require_few(seen: set[tuple[str, str, int]], functions: int, files: int) -> None:
    found = {file for file, *_ in seen if ".venv" not in file}
    assert len([one for one in seen if one[0] in found]) <= functions, sorted(seen)
    assert 3 < len(found) <= files, sorted(found)


def test_a_warm_fit_of_eight_steps_passes_few_functions() -> None:
    """The second of a model: what is built and traced once is there then."""
    ids = keras.Input((4,), dtype="int64")
    rows = et.Embedding(1000, 8, name="e")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile("adagrad", "mse")
    x, y = np.random.default_rng(0).integers(0, 1000, (512, 4)), np.ones((512, 1), np.float32)
    et.fit(model, x, y, batch_size=64, verbose=False)
    with passed() as seen:
        et.fit(model, x, y, batch_size=64, verbose=False)
    require_few(seen, 460, 81)
