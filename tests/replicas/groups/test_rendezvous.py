"""Members find each other; strangers are sent away; one that does not come is named."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elastable.embedding_store.errors import DeadlineExceeded, Unavailable
from elastable.replicas.groups.peer_monitor import MemberAddress, PeerMonitor, Rendezvous
from tests.waiting import until

DEADLINE_S = 90.0


def meet(points: list[Rendezvous], deadline_s: float = 60.0) -> list[Any]:
    """What each member's `connect` gave or raised, by rank."""
    found: list[object] = [None] * len(points)
    addresses = [MemberAddress.from_bytes(point.address.to_bytes()) for point in points]

    def connect(rank: int) -> None:
        try:
            found[rank] = points[rank].connect(rank, addresses, deadline_s)
        except Unavailable as error:
            found[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(len(points))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("one_host", [True, False])
def test_every_two_members_have_a_connection(one_host: bool) -> None:
    points = [Rendezvous(one_host) for _ in range(4)]
    found = meet(points)
    for rank, connections in enumerate(found):
        assert sorted(connections) == [other for other in range(4) if other != rank]
        for other, connection in connections.items():
            connection.sendall(bytes([rank, other]))
    for rank, connections in enumerate(found):
        for other, connection in connections.items():
            assert connection.recv(2) == bytes([other, rank])
            connection.close()
    for point in points:
        point.close()


def test_strangers_are_not_taken_for_members() -> None:
    points = [Rendezvous(one_host=True) for _ in range(2)]
    strangers = []
    for said in (b'["wrong", 1]\n', b"GET / HTTP/1.1\r\n\r\n", b'[1]\n{"a": 2}\n', b"", b"\xff\n"):
        stranger = socket.create_connection(("127.0.0.1", points[0].address.port), timeout=10)
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    zero, one = meet(points)
    one[0].sendall(b"it is me")
    assert zero[1].recv(8) == b"it is me"
    for connection in (zero[1], one[0], *strangers, *points):
        connection.close()


def test_a_missing_member_is_named() -> None:
    points = [Rendezvous(one_host=True) for _ in range(3)]
    addresses = [point.address for point in points]
    with pytest.raises(DeadlineExceeded, match=r"rank 1, 2 has not connected to rank 0 within 0\.1 s"):
        points[0].connect(0, addresses, 0.1)
    points[1].close()
    with pytest.raises(Unavailable, match=r"rank 1 cannot be reached: 127\.0\.0\.1:\d+: Connection refused"):
        points[2].connect(2, addresses, 5.0)
    for point in points:
        point.close()


def two_monitors() -> tuple[PeerMonitor, PeerMonitor]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), timeout=10)
        other, _ = server.accept()
    return PeerMonitor(0, {1: one}, DEADLINE_S), PeerMonitor(1, {0: other}, DEADLINE_S)


def test_a_member_that_leaves_reports_why_and_its_progress() -> None:
    zero, one = two_monitors()
    one.rounds[7] = 3
    one.leave("its work is done")
    assert zero.all_done(20)
    assert zero.first_lost([1], channel=7, needed=3) is None  # all that it sent is on its way
    assert zero.first_lost([1], channel=7, needed=4) == (1, "its work is done")
    assert zero.first_lost([1], channel=8, needed=1) == (1, "its work is done")
    assert zero.first_lost([0], channel=8, needed=1) is None
    for monitor in (zero, one):
        monitor.close()


def test_a_connection_that_ends_without_a_message_is_a_death() -> None:
    zero, one = two_monitors()
    one.close()
    assert not zero.all_done(20)
    assert zero.first_lost([1], channel=0, needed=1) == (1, "its process has ended without a word")
    zero.close()


def test_members_report_which_collective_they_wait_in() -> None:
    zero, one = two_monitors()
    assert "rank 1 does not answer" in zero.story([1])
    for at, expected in ((None, "rank 1 is elsewhere"), (("all_gather", (0,)), "rank 1 is in all_gather, waiting for")):
        one.at = at
        zero.ask_all()
        until(lambda: "does not answer" not in zero.story([1]))
        assert expected in zero.story([1])
    for monitor in (zero, one):
        monitor.close()


def test_a_cut_link_is_reported_after_the_deadline() -> None:
    """In a separate network; the system's word for it, ETIMEDOUT, is also that of a read that took too long."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.replicas.groups.cut_link", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    output = json.loads(ran.stdout)
    if output == "no network":
        pytest.skip("this process may not have a separate network namespace")
    silent = "nothing has come from it for 2 s: its machine is gone, or the link to it is cut"
    assert output[:2] == [[silent], [silent]]
    assert output[2] >= 2.0


def test_a_link_may_be_cut_for_as_long_as_members_wait_for_each_other() -> None:
    monitors = two_monitors()
    for monitor in monitors:
        for connection in monitor._connections.values():
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            every = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert (limit, (probes + 1) * every) == (DEADLINE_S * 1000, DEADLINE_S)
    for monitor in monitors:
        monitor.close()
