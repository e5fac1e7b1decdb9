"""Store servers behind one name of a real DNS server: found once all have an address, in the order of their tables."""

from collections.abc import Iterator

import pytest

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.embedding_store.support.store_url import server_addresses
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.jobs.servers.finding import Peers, find_servers, ordered_servers, resolved, server_now
from tests.dns_server import DnsServer
from tests.embedding_store.shards.served_shards import ServedShard
from tests.embedding_store.shards.test_store_servers import begin, commit, push_all

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture
def servers() -> Iterator[list[ServedShard]]:
    """On three addresses of this host, at one port."""
    started: list[ServedShard] = []
    while len(started) < len(HOSTS):
        port = started[0].address.rpartition(":")[2] if started else "0"
        try:
            started.append(ServedShard("memory", listen=f"{HOSTS[len(started)]}:{port}"))
        except BadInput:  # another process has this port there
            while started:
                started.pop().stop()
    yield started
    for server in started:
        server.stop()


@pytest.fixture
def dns() -> Iterator[DnsServer]:
    with DnsServer() as server:
        yield server


def addresses(stores: list[str]) -> list[str]:
    return server_addresses(find_servers(stores, 60.0))


def test_servers_are_found_in_the_order_that_their_tables_say(servers: list[ServedShard], dns: DnsServer) -> None:
    port = servers[0].address.rpartition(":")[2]
    stores = [f"dns://{dns.address}/stores.example:{port}?count=3"]
    # One server has no address yet when it is asked for first.
    dns.answers["stores.example."] = [HOSTS[:2], HOSTS]
    found = addresses(stores)
    assert (found, dns.asked) == ([f"{host}:{port}" for host in HOSTS], ["stores.example."] * 2)
    trained = [found[2], found[0], found[1]]
    with StoreServers([ShardClient(address, 60.0) for address in trained]) as store:
        begin(store)
        push_all(store, 0)
        store.commit_pushed(commit(0))
    assert addresses(stores) == trained
    dns.answers["stores.example."] = [HOSTS[:2]]
    with pytest.raises(BadInput, match=rf"127\.0\.0\.1:{port} has tables of number 1 of 3, and 2 servers are given"):
        addresses([f"dns://{dns.address}/stores.example:{port}?count=2"])


def test_a_server_that_moved_is_known_by_its_tables(servers: list[ServedShard], dns: DnsServer) -> None:
    port = servers[0].address.rpartition(":")[2]
    stores, places = [f"dns://{dns.address}/stores.example:{port}?count=2"], [f"{host}:{port}" for host in HOSTS]
    with StoreServers([ShardClient(address, 60.0) for address in (places[2], places[0])]) as store:
        begin(store)
    # Number 0 was known at another address; the one in the middle has no tables.
    known = ["127.0.0.9:1", places[0]]
    dns.answers["stores.example."] = [HOSTS]
    assert server_now(stores, 0, known) == places[2]
    assert server_now(stores, 1, known) is None
    dns.answers["stores.example."] = [HOSTS[:2]]
    assert server_now(stores, 0, known) is None
    assert server_now(["a:1", "b:1"], 0, ["a:1", "b:1"]) == "a:1"


def test_a_name_with_another_number_of_addresses_is_named(dns: DnsServer) -> None:
    name = Peers.parse("--stores", "dns://127.0.0.1:50061?count=2")
    with pytest.raises(
        Unavailable, match=r"count=2 leads to 127\.0\.0\.1:50061 after 0 s; count= says that there are 2"
    ):
        name.wait(0.0)
    with pytest.raises(Unavailable, match=r"count=2 leads to nothing after 0 s"):
        Peers.parse("--stores", f"dns://{dns.address}/nobody.example:1?count=2").wait(0.0)
    assert resolved("127.0.0.1") == ("127.0.0.1",)


def test_servers_without_tables_get_the_numbers_that_are_left() -> None:
    assert ordered_servers({"c:1": [], "a:1": [], "b:1": [(0, 3)]}) == ["b:1", "a:1", "c:1"]
    with pytest.raises(BadInput, match="a:1 and b:1 both have the tables of number 1"):
        ordered_servers({"b:1": [(1, 3)], "a:1": [(1, 3)], "c:1": []})
    with pytest.raises(BadInput, match="a:1 has tables of number 0 of 2, of number 1 of 2, and 2 servers"):
        ordered_servers({"a:1": [(0, 2), (1, 2)], "b:1": []})
    with pytest.raises(BadInput, match="a:1 has tables of no store server"):
        ordered_servers({"a:1": [None], "b:1": []})
