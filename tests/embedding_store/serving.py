"""A store behind a port, where every caller is an administrator."""

from elastable.embedding_store import EmbeddingStore
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service


def serving(store: EmbeddingStore, writable: bool = False, address: str = "127.0.0.1:0") -> GrpcServer:
    return GrpcServer(address, [store_service(store, writable)], anonymous=Role.ADMINISTRATOR)
