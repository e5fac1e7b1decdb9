"""A server whose rows are lost ends and says so: whoever starts it again has it begin with what is there."""

from pathlib import Path

import pytest
import redis

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.process.exit_codes import ExitCode
from tests.equality.test_store_servers import START_S, StoreProcess


@pytest.mark.process
@pytest.mark.parametrize(("command", "client_of"), [("store", ShardClient), ("serve", RemoteStore)])
def test_lost_keys_end_a_server(tmp_path: Path, redis_url: str, command: str, client_of: type[RemoteStore]) -> None:
    log = tmp_path / "store.log"
    server = StoreProcess(log, f"{redis_url}?namespace=lost", command=command)
    try:
        with client_of(server.address, START_S) as client:
            client.create_table(TableSpec("t", 2, 10))
        with redis.Redis.from_url(redis_url) as there:
            there.flushall()
        assert server.process.wait(timeout=60) == ExitCode.STORE_FAILED, log.read_text()
        assert "TakenOver: the store at" in log.read_text()
        assert "the server lost its keys?" in log.read_text()
        server.start()
        with RemoteSource(server.address, START_S) as rows:
            assert rows.specs() == {}
            assert rows.version() == 0
    finally:
        server.kill()
