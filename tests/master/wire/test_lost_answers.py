"""Answers that are lost, and connections that are no more without either end being told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.wire.channels import server_connection as connection
from elastable.embedding_store.wire.server import grpc_server as server
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import JobSpec, Push, PushOutcome, Slices, SyncPushId, WorkerIdentity
from elastable.master.commits.dense_part import DensePart
from elastable.master.jobs.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.wire.client import MasterClient
from elastable.master.wire.master_service import master_service
from tests.tcp_proxy import TcpProxy, tcp_proxy
from tests.waiting import until

#: So long that a test that waits for a lease to end does not end in time.
LEASE_S = 3_600.0
JOB = JobSpec(job="j", micro_batch_size=2, train_records=16, grads_to_wait=2, average="sum")


class Served:
    """A master that counts in each record's row how often it was trained, behind a proxy."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        sgd = OptimizerSpec.of("sgd", learning_rate=1.0)
        self.store.create_table(TableSpec("seen", 1, initializer=InitializerSpec("zeros"), optimizer=sgd))
        self.master = Master(JOB, self.store, DensePart(), options=MasterOptions(lease_seconds=LEASE_S))
        self.server = GrpcServer("127.0.0.1:0", [store_service(self.store), master_service(self.master)])
        self.driver = threading.Thread(target=self.master.run, daemon=True)
        self.driver.start()

    def close(self) -> None:
        self.master.stop("the test is over")
        self.server.stop(0)
        self.driver.join(timeout=60)
        self.store.close()
        assert not self.driver.is_alive()

    def leases(self) -> int:
        return sum(worker.leases for worker in self.master.status().workers)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def proxy(served: Served) -> Iterator[TcpProxy]:
    with tcp_proxy(int(served.server.address.rpartition(":")[2])) as proxy:
        yield proxy


def push_of(version: int, micro_batch: int) -> Push:
    records = np.arange(2 * micro_batch, 2 * micro_batch + 2)
    return Push(
        SyncPushId(version, micro_batch), 2, slices={"seen": Slices(records, -np.ones((2, 1), np.float32))}, job="j"
    )


def test_a_lease_whose_answer_was_lost_is_given_again_at_once(served: Served, proxy: TcpProxy) -> None:
    """The master hears nothing of it: the session before is open for it, and so its worker is alive."""
    with MasterClient(f"127.0.0.1:{proxy.port}", 60) as client, ThreadPoolExecutor(1) as beside:
        identity = WorkerIdentity("w")
        client.join(identity)
        proxy.lose_answers()
        asked = beside.submit(client.lease_tasks, "w", 3, 60.0, ())
        until(lambda: served.leases() == 3)
        assert proxy.hang_up_on_clients() >= 1
        lease = asked.result(timeout=60)
        assert [task.micro_batch for task in lease.tasks] == [0, 1, 2]
        assert served.leases() == 3, "the same ones"
        # And what is said to be held does not come again.
        assert [task.micro_batch for task in client.lease_tasks("w", 1, 0.0, lease.tasks).tasks] == [3]
        client.join(identity).close()


def test_a_push_whose_answer_was_lost_counts_once(served: Served, proxy: TcpProxy) -> None:
    with MasterClient(f"127.0.0.1:{proxy.port}", 60) as client, ThreadPoolExecutor(1) as beside:
        client.join(WorkerIdentity("w"))
        for version in range(4):
            assert client.report_gradient(push_of(version, 2 * version)).outcome is PushOutcome.ACCEPTED
            proxy.lose_answers()
            asked = beside.submit(client.report_gradient, push_of(version, 2 * version + 1))
            until(lambda: served.store.version() > version)  # noqa: B023 - it is waited for here
            proxy.hang_up_on_clients()
            assert asked.result(timeout=60).outcome is PushOutcome.STALE
        rows = served.store.lookup({"seen": np.arange(16)})["seen"]
        np.testing.assert_array_equal(rows, np.ones((16, 1)))


def test_a_session_that_is_half_open_ends_on_both_sides(
    served: Served, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within twice `KEEPALIVE_MS`, of which there is less here, so that nobody waits for it."""
    assert served.leases() == 0
    alive = 1_500  # a machine that stands still for so long ends the session, too
    told = [(name, alive) for name, value in connection.KEEPALIVE_OPTIONS if value == connection.KEEPALIVE_MS]
    assert len(told) == 3
    monkeypatch.setattr(connection, "_CHANNEL_OPTIONS", _with(connection._CHANNEL_OPTIONS, told))
    often = [*told, ("grpc.http2.min_ping_interval_without_data_ms", alive // 2)]
    monkeypatch.setattr(server, "_OPTIONS", _with(server._OPTIONS, often))
    other = GrpcServer("127.0.0.1:0", [master_service(served.master)])
    proxy.server_port = int(other.address.rpartition(":")[2])
    try:
        with MasterClient(f"127.0.0.1:{proxy.port}", 60) as client:
            session = client.join(WorkerIdentity("w"))
            client.lease_tasks("w", 3, 60.0, ())
            until(lambda: served.leases() == 3)
            time.sleep(2.5 * alive / 1000)
            assert session.alive(), "a session that is only silent lasts"
            assert len(served.master.status().workers) == 1
            proxy.lose_everything()
            until(lambda: not session.alive())
            until(lambda: not served.master.status().workers)
            # The worker goes on over another connection.
            again = client.join(WorkerIdentity("w"))
            assert len(client.lease_tasks("w", 3, 0.0, ()).tasks) == 3
            again.close()
    finally:
        other.stop(0)


def test_the_time_in_which_a_dead_connection_is_noticed() -> None:
    """What the pages say: 20 seconds, on both sides."""
    for options in (connection._CHANNEL_OPTIONS, server._OPTIONS):
        told = dict(options)
        assert told["grpc.keepalive_time_ms"] + told["grpc.keepalive_timeout_ms"] == 20_000
        assert told["grpc.http2.ping_timeout_ms"] == told["grpc.keepalive_timeout_ms"]
        assert told["grpc.keepalive_permit_without_calls"] == 1


def _with(options: list[tuple[str, int]], changed: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return list({**dict(options), **dict(changed)}.items())
