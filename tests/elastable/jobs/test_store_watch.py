"""The watch of a job's store: a store server that stays away ends the job by its number, though nobody commits."""

import pytest

from elastable.embedding_store.errors import ShardLost
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.jobs.store_watch import StoreHealth
from elastable.master.api import JobSpec, WorkerIdentity
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.process.exit_codes import ExitCode, exit_code_of
from tests.embedding_store.shards.served_shards import served
from tests.waiting import until


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
