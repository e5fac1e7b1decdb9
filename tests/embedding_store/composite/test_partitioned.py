"""Partitioned stores keep the store contract, whatever their shards are."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, PartitionedStore, RemoteStore
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore
from tests.embedding_store.serving import serving


def memories(shards: int) -> list[EmbeddingStore]:
    return [MemoryStore(threads=1) for _ in range(shards)]


KINDS: dict[str, Callable[[pytest.FixtureRequest], MakeStore]] = {
    "token over 3": lambda asked: lambda: PartitionedStore(memories(3)),
    "encoding over 4": lambda asked: lambda: PartitionedStore(memories(4), "encoding"),
    "token over encoding": lambda asked: over(lambda: PartitionedStore(memories(2), "encoding"), 2),
    "token over remote": lambda asked: over(partial(_remote, asked.getfixturevalue("held")), 2),
}


class TestPartitioned(StoreContract):
    times = 1  # the longest test; what is beneath has a history of its own

    @pytest.fixture(params=KINDS)
    def make_store(self, request: pytest.FixtureRequest) -> MakeStore:
        return KINDS[request.param](request)

    @pytest.mark.parametrize("make_store", [kind for kind in KINDS if "remote" not in kind], indirect=True)
    def test_put_keeps_what_training_made(self, store: EmbeddingStore) -> None:
        """Which a parameter server does not: it believes no client."""
        super().test_put_keeps_what_training_made(store)


def over(shard: Callable[[], EmbeddingStore], shards: int) -> MakeStore:
    return lambda: PartitionedStore([shard() for _ in range(shards)])


def _remote(held: ExitStack) -> EmbeddingStore:
    server = held.enter_context(serving(held.enter_context(MemoryStore(threads=1)), writable=True))
    return RemoteStore(server.address)
