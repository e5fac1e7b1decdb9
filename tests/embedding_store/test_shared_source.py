"""Rows read from another process' memory: one state whole, whatever the owner does, and whoever dies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import numpy as np
import pytest

from embedding_store.grpc_server import GrpcServer
from embedding_store.remote import RemoteSource
from embedding_store.service import store_service
from embedding_store.shared_source import SharedSource
from embedding_store.shared_store import SharedMemoryStore
from embedding_store.store import Float32, Int64
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore


class ReadAttached(SharedMemoryStore):
    """A store whose rows are read as another process reads them."""

    def __init__(self, direct_bytes: int) -> None:
        super().__init__(2, direct_bytes=direct_bytes)
        self.server = GrpcServer("127.0.0.1:0", [store_service(self)])
        self.source = SharedSource(RemoteSource(self.server.address, 30), threads=2, required=True)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        rows = self.source.lookup(ids, version)
        assert self.source.attached or self._closed
        return rows

    def close(self) -> None:
        super().close()
        self.source.close()
        self.server.stop(0)


class _Attached(StoreContract):
    pass


class TestAttachedMemory(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: ReadAttached(1 << 30)


class TestAttachedMemoryBehindAnIndex(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: ReadAttached(0)
