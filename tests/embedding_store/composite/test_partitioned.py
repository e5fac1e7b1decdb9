"""Partitioned stores keep the store contract, whatever their shards are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from elastable.embedding_store.composite import PartitionedStore
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.remote_store import RemoteStore
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore
from tests.file_stores import file_store


def memories(shards: int) -> list[EmbeddingStore]:
    return [MemoryStore(threads=1) for _ in range(shards)]


def redis_shards(url: str) -> Callable[[], EmbeddingStore]:
    """A shard that is empty each time: in a namespace of its own."""
    numbers = count()
    return lambda: open_store(f"{url}?namespace=shard/{next(numbers)}&partitions=4")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class TestTokenOverThree(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: PartitionedStore(memories(3))


class TestEncodingOverFour(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: PartitionedStore(memories(4), "encoding")


class TestTokenOverEncoding(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: PartitionedStore([PartitionedStore(memories(2), "encoding") for _ in range(2)])


class TestTokenOverFiles(StoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        folders = count()
        return lambda: PartitionedStore([file_store(tmp_path / str(next(folders)), 1 << 20, 1) for _ in range(2)])


class TestTokenOverRedis(StoreContract):
    @pytest.fixture
    def make_store(self, redis_url: str) -> MakeStore:
        shard = redis_shards(redis_url)
        return lambda: PartitionedStore([shard() for _ in range(3)])


class TestTokenOverCluster(StoreContract):
    @pytest.fixture
    def make_store(self, redis_cluster_url: str) -> MakeStore:
        shard = redis_shards(redis_cluster_url)
        return lambda: PartitionedStore([shard(), shard()])


class TestEncodingOverMixedKinds(StoreContract):
    """Shards that hold rows in different orders."""

    @pytest.fixture
    def make_store(self, redis_url: str) -> MakeStore:
        shard = redis_shards(redis_url)
        return lambda: PartitionedStore([*memories(1), shard()], "encoding")


class TestTokenOverRemote(StoreContract):
    @pytest.fixture
    def make_store(self, held: ExitStack) -> MakeStore:
        return lambda: PartitionedStore([_remote(held) for _ in range(2)])


class TestRemoteOverToken(StoreContract):
    @pytest.fixture
    def make_store(self, held: ExitStack) -> MakeStore:
        return lambda: _remote(held, held.enter_context(PartitionedStore(memories(2))))


def _remote(held: ExitStack, store: EmbeddingStore | None = None) -> EmbeddingStore:
    served = held.enter_context(MemoryStore(threads=1)) if store is None else store
    server = held.enter_context(GrpcServer("127.0.0.1:0", [store_service(served, True)], anonymous=Role.ADMINISTRATOR))
    return RemoteStore(server.address)
