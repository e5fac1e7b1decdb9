"""Answers that are lost, and connections that are gone without notice to either end."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from elastable.embedding_store.wire.channels import server_connection as connection
from elastable.embedding_store.wire.server import grpc_server as server
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.master.api import PushOutcome, WorkerIdentity
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from tests.master.rpc.test_identities import SYNC, Served, push_of, serve
from tests.tcp_proxy import TcpProxy, tcp_proxy
from tests.waiting import until


@pytest.fixture
def served() -> Iterator[Served]:
    """A master that counts in each record's row how often it was trained; its leases end no sooner than in an hour."""
    with ExitStack() as held:
        yield serve(held, SYNC)


def leases(served: Served) -> int:
    return sum(worker.leases for worker in served.master.status().workers)


@pytest.fixture
def proxy(served: Served) -> Iterator[TcpProxy]:
    with tcp_proxy(int(served.address.rpartition(":")[2])) as proxy:
        yield proxy


def test_a_lease_whose_answer_was_lost_is_given_again_at_once(served: Served, proxy: TcpProxy) -> None:
    """The master hears nothing of it: the session before is open for it, and so its worker is alive."""
    with MasterClient(f"127.0.0.1:{proxy.port}", 60) as client, ThreadPoolExecutor(1) as beside:
        identity = WorkerIdentity("w")
        client.join(identity)
        proxy.lose_answers()
        asked = beside.submit(client.lease_tasks, "w", 3, 60.0, ())
        until(lambda: leases(served) == 3)
        assert proxy.hang_up_on_clients() >= 1
        lease = asked.result(timeout=60)
        assert [task.micro_batch for task in lease.tasks] == [0, 1, 2]
        assert leases(served) == 3, "the same ones"
        # And what is said to be held does not come again.
        assert [task.micro_batch for task in client.lease_tasks("w", 1, 0.0, lease.tasks).tasks] == [3]
        client.join(identity).close()


def test_a_push_whose_answer_was_lost_counts_once(served: Served, proxy: TcpProxy) -> None:
    with MasterClient(f"127.0.0.1:{proxy.port}", 60) as client, ThreadPoolExecutor(1) as beside:
        client.join(WorkerIdentity("w"))
        for version in range(4):
            assert client.report_gradient(push_of(SYNC, 2 * version)).outcome is PushOutcome.ACCEPTED
            proxy.lose_answers()
            asked = beside.submit(client.report_gradient, push_of(SYNC, 2 * version + 1))
            until(lambda: served.store.version() > version)  # noqa: B023 - it is waited for here
            proxy.hang_up_on_clients()
            assert asked.result(timeout=60).outcome is PushOutcome.STALE
        rows = served.store.lookup({"seen": np.arange(16)})["seen"]
        np.testing.assert_array_equal(rows, np.ones((16, 1)))


def test_half_open_sessions_end_on_both_sides(served: Served, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within twice `KEEPALIVE_MS`, of which there is less here, so that nobody waits for it."""
    assert leases(served) == 0
    alive = 3_000  # a machine that is suspended for so long ends the session, too
    keepalive = [(name, alive) for name, value in connection.KEEPALIVE_OPTIONS if value == connection.KEEPALIVE_MS]
    assert len(keepalive) == 3
    monkeypatch.setattr(connection, "_CHANNEL_OPTIONS", _with(connection._CHANNEL_OPTIONS, keepalive))
    often = [*keepalive, ("grpc.http2.min_ping_interval_without_data_ms", alive // 2)]
    monkeypatch.setattr(server, "_OPTIONS", _with(server._OPTIONS, often))
    other = GrpcServer("127.0.0.1:0", [master_service(served.master)])
    proxy.server_port = int(other.address.rpartition(":")[2])
    try:
        with MasterClient(f"127.0.0.1:{proxy.port}", 60) as client:
            session = client.join(WorkerIdentity("w"))
            client.lease_tasks("w", 3, 60.0, ())
            until(lambda: leases(served) == 3)
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
        values = dict(options)
        assert values["grpc.keepalive_time_ms"] + values["grpc.keepalive_timeout_ms"] == 20_000
        assert values["grpc.http2.ping_timeout_ms"] == values["grpc.keepalive_timeout_ms"]
        assert values["grpc.keepalive_permit_without_calls"] == 1


def _with(options: list[tuple[str, int]], changed: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return list({**dict(options), **dict(changed)}.items())
