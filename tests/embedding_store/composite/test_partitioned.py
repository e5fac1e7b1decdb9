"""Partitioned stores keep the store contract, whatever their shards are."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count

import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, PartitionedStore, RemoteStore
from elastable.embedding_store.open_store import open_store
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore
from tests.embedding_store.serving import serving
from tests.embedding_store.store_kinds import in_files


def memories(shards: int) -> list[EmbeddingStore]:
    return [MemoryStore(threads=1) for _ in range(shards)]


def redis_shards(url: str) -> Callable[[], EmbeddingStore]:
    """A shard that is empty each time: in a separate namespace."""
    numbers = count()
    return lambda: open_store(f"{url}?namespace=shard/{next(numbers)}&partitions=4")


KINDS: dict[str, Callable[[pytest.FixtureRequest], MakeStore]] = {
    "token over 3": lambda asked: lambda: PartitionedStore(memories(3)),
    "encoding over 4": lambda asked: lambda: PartitionedStore(memories(4), "encoding"),
    "token over encoding": lambda asked: over(lambda: PartitionedStore(memories(2), "encoding"), 2),
    "token over files": lambda asked: over(partial(in_files, asked.getfixturevalue("tmp_path")), 2),
    "token over redis": lambda asked: over(redis_shards(asked.getfixturevalue("redis_url")), 3),
    "token over cluster": lambda asked: over(redis_shards(asked.getfixturevalue("redis_cluster_url")), 2),
    "encoding over mixed kinds": lambda asked: mixed(redis_shards(asked.getfixturevalue("redis_url"))),
    "token over remote": lambda asked: over(partial(_remote, asked.getfixturevalue("held")), 2),
    "remote over token": lambda asked: partial(remote_over_token, asked.getfixturevalue("held")),
}
REPEATED = ("token over cluster", "encoding over mixed kinds")  # stores of one shard of each kind show it

# The longest test; what is beneath the others has one of its own.
HISTORIES = [
    kind
    if kind in ("token over 3", "encoding over 4", "remote over token")
    else pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS
]


class TestPartitioned(StoreContract):
    @pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.slow) if kind in REPEATED else kind for kind in KINDS])
    def make_store(self, request: pytest.FixtureRequest) -> MakeStore:
        return KINDS[request.param](request)

    @pytest.mark.parametrize("make_store", HISTORIES, indirect=True)
    def test_any_history_is_that_of_a_store_in_memory(self, make_store: MakeStore) -> None:
        super().test_any_history_is_that_of_a_store_in_memory(make_store)

    @pytest.mark.parametrize("make_store", [kind for kind in KINDS if "remote" not in kind], indirect=True)
    def test_put_keeps_what_training_made(self, store: EmbeddingStore) -> None:
        """Which a parameter server does not: it believes no client."""
        super().test_put_keeps_what_training_made(store)


def over(shard: Callable[[], EmbeddingStore], shards: int) -> MakeStore:
    return lambda: PartitionedStore([shard() for _ in range(shards)])


def mixed(shard: Callable[[], EmbeddingStore]) -> MakeStore:
    return lambda: PartitionedStore([*memories(1), shard()], "encoding")


def remote_over_token(held: ExitStack) -> EmbeddingStore:
    return _remote(held, held.enter_context(PartitionedStore(memories(2))))


def _remote(held: ExitStack, store: EmbeddingStore | None = None) -> EmbeddingStore:
    served = held.enter_context(MemoryStore(threads=1)) if store is None else store
    server = held.enter_context(serving(served, writable=True))
    return RemoteStore(server.address)
