"""A store over mutual TLS with a token keeps the store contract."""

from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store import Credentials, RemoteSource, SharedSource, TableSpec, Unauthenticated
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore
from tests.certificates import Authority

IDS = np.arange(5_000)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Authority(tmp_path_factory.mktemp("secure") / "tls").mutual()


def test_memory_is_shared_with_those_who_may_call(credentials: Credentials) -> None:
    with SharedMemoryStore(2) as store:
        store.create_table(TableSpec("t", 4))
        with GrpcServer("127.0.0.1:0", [store_service(store)], credentials=credentials) as server:
            with SharedSource(RemoteSource(server.address, 60, credentials), required=True) as source:
                assert source.attached
                np.testing.assert_array_equal(source.lookup({"t": IDS})["t"], store.lookup({"t": IDS})["t"])
            with RemoteSource(server.address, 60, replace(credentials, token=None)) as stranger:
                with pytest.raises(Unauthenticated):
                    SharedSource(stranger, required=True)
                with SharedSource(stranger) as source, pytest.raises(Unauthenticated):
                    source.lookup({"t": IDS})
