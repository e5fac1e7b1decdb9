"""A store of another process that dies while it is saved, and begins anew with nothing: that is no checkpoint."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import BadInput, ElastableError, StaleVersion
from elastable.embedding_store.wire.remote_store import RemoteStore
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.checkpoints.storage.checkpoint_locations import newest_checkpoint
from elastable.master.checkpoints.writing import write_checkpoint
from tests.master.checkpoints.jobs import JOB, created, dense_of, progress_of, train


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_that_began_anew_is_not_saved(tmp_path: Path, pinned: bool) -> None:
    with created(MemoryStore(threads=1)) as store:
        train(store, 3)
        with GrpcServer("127.0.0.1:0", [store_service(store, writable=True)]) as server:
            address = server.address
            remote = RemoteStore(address)
            source = remote.pin(3) if pinned else remote
    with closing(remote), MemoryStore(threads=1) as empty:
        if pinned:
            empty.reset_version(3)  # even where it has come as far, without any table
        with GrpcServer(address, [store_service(empty, writable=True)]):
            wrong: type[ElastableError] = StaleVersion if pinned else BadInput
            with pytest.raises(wrong):
                write_checkpoint(tmp_path, source, dense_of(3), JOB, progress_of(3))
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("ckpt")] == []
    assert newest_checkpoint(tmp_path) is None
