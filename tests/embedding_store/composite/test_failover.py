"""A store that moves from one address to another, and sources that forget the one they read before."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

from elastable.embedding_store import MemoryStore, PartitionedStore, RemoteSource, SharedMemoryStore, SharedSource
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, FutureVersion, Unavailable, Unsupported
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.wire.channels.server_connection import CallChannel
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels
from tests.embedding_store.serving import serving
from tests.ports import free_address

SPEC = TableSpec("t", 4, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))
IDS = np.arange(20)


def store_at(
    held: ExitStack, version: int, change: float, kind: type[MemoryStore] = MemoryStore, shard: bool = False
) -> MemoryStore:
    """A store (the one shard of a partitioned one, perhaps) whose rows of IDS tell of `change`."""
    store = held.enter_context(kind())
    (PartitionedStore([store]) if shard else store).create_table(SPEC)
    for number in range(1, version + 1):
        update = TableUpdate(IDS, np.full((len(IDS), 4), change, np.float32))
        store.commit(Commit(number, {"t": update}, number - 1, {}))
    return store


def served(held: ExitStack, store: MemoryStore, address: str = "127.0.0.1:0") -> GrpcServer:
    return held.enter_context(serving(store, address=address))


def rows(store: MemoryStore) -> Float32:
    return store.lookup({"t": IDS})["t"]


def free_addresses(count: int) -> list[str]:
    return [free_address() for _ in range(count)]


def test_calls_of_every_shape_go_to_the_address_that_answers(held: ExitStack) -> None:
    first, nobody, second = free_addresses(3)
    old, new = store_at(held, 2, 1.0), store_at(held, 2, 5.0)
    server = served(held, old, first)
    source = held.enter_context(RemoteSource(f"{first}, {nobody},{second}", deadline_s=60))
    assert source.specs() == {"t": SPEC}
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 2)["t"], rows(old))  # of an unknown width: a stream
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 2)["t"], rows(old))  # one message each way
    server.stop(0)
    served(held, new, second)
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 2)["t"], rows(new))
    many = np.arange(300_000)  # ids in several frames
    np.testing.assert_array_equal(source.lookup({"t": many})["t"], new.lookup({"t": many})["t"])
    # And back, with a name.
    served(held, old, first)
    named = held.enter_context(RemoteSource(f"{nobody},localhost:{first.rpartition(':')[2]}", deadline_s=60))
    np.testing.assert_array_equal(named.lookup({"t": IDS}, 2)["t"], rows(old))


def test_one_thread_that_turns_away_does_not_turn_the_others_back() -> None:
    with CallChannel(*(grpc.insecure_channel(f"127.0.0.1:{port}") for port in (1, 2, 3))) as channel:
        left = channel.at
        with ThreadPoolExecutor(8) as threads:
            for _ in range(64):
                threads.submit(channel.leave, left)
        assert channel.at == 1
        channel.leave(1)
        channel.leave(2)
        assert channel.at == 0


def test_nobody_at_any_address_is_said_with_all_of_them() -> None:
    addresses = ",".join(free_addresses(2))
    with RemoteSource(addresses, deadline_s=0.5) as source, pytest.raises(Unavailable, match=addresses):
        source.version()


@pytest.mark.parametrize(
    ("written", "said"),
    [("a:1,", "address ''"), ("a:1,b", "address 'b'"), ("a:1,a:1", "one appears twice"), ("a:1,b:0", "port 0")],
)
def test_lists_of_addresses_that_cannot_be(written: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        RemoteSource(written)


def test_a_source_of_shared_memory_forgets_the_memory_of_the_store_before(held: ExitStack) -> None:
    """Also where that one still lives: what the network says counts."""
    first, second = free_addresses(2)
    old, new = store_at(held, 3, 1.0, SharedMemoryStore), store_at(held, 2, 5.0, SharedMemoryStore)
    server = served(held, old, first)
    source = held.enter_context(SharedSource(RemoteSource(f"{first},{second}", deadline_s=60), required=True))
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 3)["t"], rows(old))
    server.stop(0)
    served(held, new, second)
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 3)["t"], rows(old))
    source.forget()
    with pytest.raises(FutureVersion):
        source.lookup({"t": IDS}, 3)
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 2)["t"], rows(new))
    assert source.attached


def test_a_letter_for_the_process_before_finds_nothing_at_the_one_that_follows(held: ExitStack) -> None:
    plan = BodyPlan("GradientFrame")
    plan.add("x", (3,), np.dtype(np.int64))
    messages = []
    stores = [held.enter_context(SharedMemoryStore()) for _ in range(2)]
    for number, store in enumerate(stores):
        channel = SharedChannel(store.attachments.name, store.attachments.token)
        held.callback(channel.close)
        messages.append(channel.put([np.full(3, number)]))
    assert [message.stamp for message in messages] == [1, 1]
    assert stores[0].channels.read(messages[0], plan)[0].tolist() == [0, 0, 0]
    with pytest.raises(Unsupported, match="is not known here"):
        stores[1].channels.read(messages[0], plan)
    assert isinstance(stores[1].channels, SharedChannels)


def test_a_call_that_waits_does_not_disturb_the_generator_of_all() -> None:
    """A model is built from seeds that Keras draws of it, perhaps while another thread waits for a server."""
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with RemoteSource(free_addresses(1)[0], deadline_s=0.4) as source, pytest.raises(Unavailable):
        source.version()
    assert random.random() == expected
