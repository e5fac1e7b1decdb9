"""A store behind a port, where every caller is an administrator."""

from elastable.embedding_store import EmbeddingStore
from elastable.embedding_store.shards.client_pushes import ClientPushes
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.pushes.shard_service import shard_service
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.service.store_service import store_service


def client_service(store: EmbeddingStore, not_finite: str = "refuse") -> Service:
    """As `elastable serve` has it."""
    return shard_service(Shard(store, clients=ClientPushes(store, not_finite)))


def serving(store: EmbeddingStore, writable: bool = False, address: str = "127.0.0.1:0") -> GrpcServer:
    service = client_service(store) if writable else store_service(store)
    return GrpcServer(address, [service], anonymous=Role.ADMINISTRATOR)
