"""Every record is trained exactly once per epoch where rows are at store servers, whoever dies.

A row says, like those of `test_exactly_once`, how often its record was trained.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.errors import StaleVersion
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.master.api import JobSpec, Push, PushReply, Task
from elastable.master.commits.accumulate import Accumulated
from elastable.master.commits.version_record import VersionRecord
from elastable.master.tasks.progress import Progress
from elastable.worker.runtime.loop import push_rows
from tests.embedding_store.shards.served_shards import ServedShard, served, stopped_with
from tests.master.core.test_exactly_once import (
    ASYNC,
    BOUNDED,
    EPOCHS,
    RECORDS,
    SEEN,
    SYNC,
    Clumsy,
    Life,
    Post,
    disturbed,
)
from tests.tcp_proxy import TcpProxy, tcp_proxy


def _clients(servers: Sequence[ServedShard]) -> StoreServers:
    return StoreServers([ShardClient(server.address, 60.0) for server in servers])


class ServersLife(Life):
    """Goes on from what the store servers have; `kills`: at a version, the number of the one that is killed."""

    def __init__(
        self, job: JobSpec, proxy: TcpProxy, servers: list[ServedShard], dies_at: int | None, kills: Mapping[int, int]
    ) -> None:
        store = _clients(servers)
        store.create_table(SEEN)
        store.recover()
        record = store.record()
        start = Progress() if record is None else VersionRecord.from_bytes(record).progress
        super().__init__(job, proxy, store, start, dies_at)
        self.ages: list[int] = []
        self._note_ages()
        self._servers, self._kills, self._of_servers = servers, kills, store

    def _note_ages(self) -> None:
        committer = self.master._driver._committer
        commit = committer.commit

        def noted(version: int, pushes: Sequence[Push], progress: Callable[[Accumulated], Progress]) -> Accumulated:
            made = commit(version, pushes, progress)
            self.ages += [version - 1 - push.computed_on for push in pushes if push.computed_on is not None]
            return made

        committer.commit = noted  # type: ignore[method-assign]

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version in self._kills:
            stopped_with(self._servers, self._kills[version])
            self._of_servers.require_owner()  # as `elastable master` says every second
        super().on_version(version, logs)

    def close(self) -> None:
        self.server.stop(0)
        self._of_servers.close()


class Worker(Clumsy):
    """Hands the rows' part of its pushes to the store servers; what is left may be said twice, late or never."""

    def __init__(self, job: JobSpec, address: str, post: Post, seed: int, servers: StoreServers) -> None:
        super().__init__(job, address, post, seed)
        self.servers = servers

    def work(self, task: Task) -> None:
        try:
            super().work(task)
        except StaleVersion:
            self.tasks.discard(task)

    def push_of(self, task: Task, version: int) -> Push:
        return push_rows(super().push_of(task, version), self.servers, self.job, 60.0, lambda: None)


@pytest.mark.parametrize(
    "job",
    [pytest.param(SYNC, marks=pytest.mark.slow), pytest.param(ASYNC, marks=pytest.mark.slow), BOUNDED],
    ids=["sync", "async", "bounded"],
)
def test_every_record_is_trained_once_per_epoch(tmp_path: Path, job: JobSpec) -> None:
    """Clumsy workers, a disturbed network, two store servers that are killed in turn, and a master that is killed."""
    deaths, kills = ((20, None), {9: 0, 31: 1}) if job.mode == "async" else ((8, None), {4: 0, 11: 1})
    ages: list[int] = []
    with tcp_proxy(1) as proxy, served(2, tmp_path) as (servers, rows), ExitStack() as held:
        address = f"127.0.0.1:{proxy.port}"
        post = Post(address)
        workers = [Worker(job, address, post, seed, rows) for seed in range(3)]
        life = ServersLife(job, proxy, servers, deaths[0], kills)
        with disturbed(workers, post, proxy):
            for dies_at in deaths:
                life.master.run(life)
                ages += life.ages
                if life.master.stop_reason is None:
                    break
                life.close()
                life = ServersLife(job, proxy, servers, deaths[1] if dies_at else None, kills)
            held.callback(life.close)
        np.testing.assert_array_equal(life.counts(), np.full(RECORDS, EPOCHS))
        assert life.master.status().records_trained == EPOCHS * RECORDS
    assert job.mode == "sync" or (len(ages) == life.master.status().version and min(ages) >= 0)
    assert job.staleness_bound is None or max(ages) <= job.staleness_bound


def test_a_push_whose_rows_are_lost_is_refused_and_computed_again(tmp_path: Path) -> None:
    """A store server is killed once it has the rows of a push, and before the master has the rest."""
    job = replace(ASYNC, epochs=1, validation_records=0)
    with tcp_proxy(1) as proxy, served(2, tmp_path) as (servers, rows), ExitStack() as held:
        life = ServersLife(job, proxy, servers, None, {})
        held.callback(life.close)
        ran = threading.Thread(target=life.master.run, args=(life,), daemon=True)
        ran.start()
        address = f"127.0.0.1:{proxy.port}"
        worker = Worker(job, address, Post(address), 0, rows)
        held.callback(worker.client.close)
        session = worker.born()
        outcomes: list[PushReply] = []
        while not (lease := worker.client.lease_tasks(worker.identity.incarnation, 1, 30.0)).finished:
            for task in lease.tasks:
                snapshot = worker.client.pull_dense(worker.identity.incarnation, None, 30.0)
                assert snapshot is not None
                left = worker.push_of(task, snapshot.version)
                if len(outcomes) == 3:
                    stopped_with(servers, 1)
                outcomes.append(worker.client.report_gradient(left))
        session.close()
        ran.join(timeout=60)
        refused = [reply for reply in outcomes if reply.outcome != "accepted"]
        assert [(reply.outcome, reply.reason) for reply in refused] == [
            ("stale", "a store server lost its rows: it is computed again")
        ]
        assert outcomes[3] is refused[0]
        np.testing.assert_array_equal(life.counts(), np.ones(RECORDS))
        assert life.master.status().version == len(outcomes) - 1
