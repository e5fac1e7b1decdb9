"""How long a client waits for a server with silent clients, busy ones, workers that push, slow ones, and all of them.

The server and the busy clients run in separate processes.

    python -m benchmarks.calls.load
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import grpc
import numpy as np

from benchmarks.calls.sessions import STILL, serving, stub_workers
from benchmarks.calls.silent_clients import SilentClients, slow_clients
from benchmarks.harness import Row, publish
from benchmarks.processes import child, line_of
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import encode
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.remote_source import RemoteSource

_SPEC = TableSpec(STILL, 16, 100_000)
_IDS = 64
_CLIENTS_EACH = 50  # of a process
_GRADS_TO_WAIT = 8
_SERVES_S = 600.0
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """The other clients.

    Attributes:
        name: For the rows.
        silent: Connections whose message never comes.
        busy: Clients that look rows up all the time.
        pushing: Workers that push gradients all the time.
        slow: Whether there are one that does not read on, and one that does not say on.
    """

    name: str
    silent: int = 0
    busy: int = 0
    pushing: int = 0
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Waits:
    """What the good client saw.

    Attributes:
        seconds: Of each lookup, repeats included.
        wrong: Lookups whose rows were not those of a store that nobody keeps busy.
        unanswered: Lookups without an answer within the deadline of 30 s.
    """

    seconds: tuple[float, ...]
    wrong: int = 0
    unanswered: int = 0

    def percentile(self, share: float) -> float:
        """Seconds within which so many of a hundred lookups were answered."""
        return float(np.percentile(self.seconds, share)) if self.seconds else float("nan")


_LOADS = (
    Load("nobody else"),
    Load("1,000 silent clients", silent=1_000),
    Load("200 busy clients", busy=200),
    Load("1,000 silent and 200 busy clients", silent=1_000, busy=200),
    Load("200 workers that push", pushing=200),
    Load("a slow reader and a slow sender", slow=True),
    Load("1,000 silent clients, 200 workers that push, both slow ones", silent=1_000, pushing=200, slow=True),
)


def main() -> None:
    """Measures, prints and writes `results/load.json`."""
    rows: list[Row] = []
    for load in _LOADS:
        with serving(_GRADS_TO_WAIT) as served:
            waits = measure(served.address, load, seconds=10.0)
        alone = rows[0].value if rows else None
        for what, share in (("p50", 50.0), ("p99", 99.0)):
            took = 1e6 * waits.percentile(share)
            note = f"{len(waits.seconds)} lookups, {waits.unanswered} unanswered, {waits.wrong} wrong"
            rows.append(Row(f"{what} of a lookup of {_IDS} rows with {load.name}", took, "us", alone, None, note=note))
    publish("load", "A good client among silent and busy ones", rows)


def measure(address: str, load: Load, seconds: float = 0.0, lookups: int = 1) -> Waits:
    """Looks rows up for so long, and at least so often, while the load is there."""
    ids = np.arange(_IDS, dtype=np.int64) * 7
    with ExitStack() as held:
        own = held.enter_context(MemoryStore(1))
        own.create_table(_SPEC)
        expected = own.lookup({STILL: ids})[STILL]
        if load.silent:
            method = f"/{STORE_SERVICE}/LookupSmall"
            held.enter_context(SilentClients(address, method, load.silent))
        if load.busy:
            held.enter_context(busy_clients(address, load.busy))
        if load.pushing:
            held.enter_context(stub_workers(address, load.pushing))
        if load.slow:
            held.enter_context(slow_clients(address, STILL))
        source = held.enter_context(RemoteSource(address, _DEADLINE_S))
        waits: list[float] = []
        wrong = unanswered = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(waits) < lookups:
            began = time.perf_counter()
            try:
                wrong += not np.array_equal(source.lookup({STILL: ids})[STILL], expected)
            except Unavailable:
                unanswered += 1
            waits.append(time.perf_counter() - began)
        return Waits(tuple(waits), wrong, unanswered)


@contextmanager
def busy_clients(address: str, count: int) -> Iterator[None]:
    """So many clients, each with a separate connection, that look rows up all the time."""
    with ExitStack() as held:
        for first in range(0, count, _CLIENTS_EACH):
            some = str(min(_CLIENTS_EACH, count - first))
            line_of(held.enter_context(child("benchmarks.calls.load", "busy", address, some)))  # they are connected
        yield


def _keep_busy(address: str, count: int) -> None:
    ids = np.arange(_IDS, dtype=np.int64) * 11
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table=STILL, count=_IDS)])
    frame = next(encode(header.SerializeToString(), [ids]))
    connected = threading.Barrier(count + 1)

    def ask() -> None:
        # Channels share connections otherwise.
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            look_up = channel.unary_unary(f"/{STORE_SERVICE}/LookupSmall", None, None)
            with suppress(grpc.RpcError):
                look_up(frame, timeout=_DEADLINE_S)
            connected.wait()
            while True:
                with suppress(grpc.RpcError):  # as it is asked to come again
                    look_up(frame, timeout=_DEADLINE_S)

    for _ in range(count):
        threading.Thread(target=ask, daemon=True).start()
    connected.wait()
    print("busy", flush=True)
    time.sleep(_SERVES_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["busy"]:
        _keep_busy(sys.argv[2], int(sys.argv[3]))
    else:
        main()
