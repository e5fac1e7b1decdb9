"""Store servers that lose their rows, come back empty or stay away: who ends, and with which error and exit code."""

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import ShardLost
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore, ShardClient
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.jobs.store_watch import StoreHealth
from elastable.master.api import JobSpec, WorkerIdentity
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.process.exit_codes import ExitCode, exit_code_of
from tests.elastable.processes import CLICK_JOB, Hold, Running, elastable
from tests.embedding_store.shards.served_shards import served
from tests.equality.test_store_servers import START_S, StoreProcess
from tests.ports import free_address
from tests.waiting import until


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


LAST_OF_EPOCH = 20  # behind it the epoch is evaluated, and nobody commits
JOB = ("--epochs", "2", "--micro-batch-size", "32", "--grads-to-wait", "2", "--no-export", "--deadline", "8")


# tests/equality/test_store_server_faults.py loses rows in mid-epoch.
@pytest.mark.timeout(900)
def test_a_killed_shard_that_comes_back_empty_ends_the_job_by_name(tmp_path: Path) -> None:
    addresses = [free_address() for _ in range(3)]
    with ExitStack() as processes:

        def start(name: str, *arguments: str, env: dict[str, str] | None = None) -> Running:
            return processes.enter_context(elastable(tmp_path, *arguments, env=env, name=name))

        shards = [start(f"shard{n}", "store", "--listen", address) for n, address in enumerate(addresses[:2])]
        for shard in shards:
            shard.address()
        hold, stores = Hold(tmp_path / "hold", LAST_OF_EPOCH), f"{addresses[0]},{addresses[1]}"
        job = ("master", str(CLICK_JOB), *JOB, "--stores", stores, "--run-dir", str(tmp_path / "runs"))
        master = start("master", *job, "--listen", addresses[2], env=hold.environment)
        worker = start("worker", "worker", str(CLICK_JOB), "--master", addresses[2], "--deadline", "60")
        hold.wait(master)
        shards[1].signal(signal.SIGKILL)
        shards[1].wait()
        start("shard1-again", "store", "--listen", addresses[1]).address()
        hold.go()
        codes = master.wait(), worker.wait()
        shards[0].signal(signal.SIGTERM)
        assert shards[0].wait() == ExitCode.INTERRUPTED, shards[0].err
    assert codes == (ExitCode.STORE_FAILED, ExitCode.STORE_FAILED), f"{master.err}\n{worker.err}"
    for ended in (master, worker):
        assert re.search(r"^ShardLost: .*shard 1 of 2", ended.err, re.MULTILINE), ended.err


def test_a_store_server_that_stays_away_is_lost_for_master_and_workers() -> None:
    with served(2) as (servers, store):
        master = Master(JobSpec(job="job", train_records=10), store, DensePart())
        master.join(WorkerIdentity("w"))
        servers[1].stop()
        away, health = store._servers[1], StoreHealth()
        assert isinstance(away, ShardClient)
        away.connection.deadline_s = 0.5
        with health.watching(store, lambda error: master.report_failure("store", error, fatal=True), deadline_s=0.1):
            until(lambda: "failed" in (master.not_ready() or ""))
        named = f"shard 1 of 2: {servers[1].address} .*taken for lost, as it stayed away for the deadline of 0.1 s"
        with pytest.raises(ShardLost, match=named) as raised:
            master.lease_tasks("w", 1, 0.0)
        assert exit_code_of(raised.value) == ExitCode.STORE_FAILED
        assert f"shard 1 of 2: {servers[1].address}" in (health.not_ready() or "")
        servers[1].start()
