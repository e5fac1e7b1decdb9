"""Store servers that register in a real Redis: numbers under leases, where they are, who is missing."""

import threading
from collections.abc import Iterator

import pytest

from elastable.embedding_store.errors import BadInput, TakenOver, Unavailable
from elastable.embedding_store.tiers.redis.url import RedisUrl
from elastable.jobs.options import JobOptions, StoreServerOptions
from elastable.jobs.servers.store_registry import Registration, StoreRegistry, is_registry
from tests.elastable.processes import CLICK_JOB


@pytest.fixture
def registry(redis_url: str) -> Iterator[StoreRegistry]:
    with StoreRegistry(f"{redis_url}?namespace=elastable/test") as opened:
        yield opened


def die(registration: Registration) -> None:
    """As a process that is killed: nothing is given back."""
    registration._kept.close()


def never(reason: str) -> None:
    raise AssertionError(reason)


def test_servers_get_numbers_and_are_found_in_their_order(registry: StoreRegistry) -> None:
    hosts = [f"host-{n}" for n in range(3)]
    taken = [registry.take(None, host) for host in hosts]
    assert [one.number for one in taken] == [0, 1, 2]
    for one, host in reversed(list(zip(taken, hosts, strict=True))):
        one.announce(f"{host}:50061", never)
    assert registry.addresses(60.0) == [f"{host}:50061" for host in hosts]
    for one in taken:
        one.close()


def test_a_number_that_is_held_is_refused_and_one_that_was_given_back_is_not(registry: StoreRegistry) -> None:
    with registry.take(1, "host-a") as held:
        held.announce("host-a:50061", never)
        with pytest.raises(TakenOver, match=r"store server 1 of .* is at host-a:50061.*--number"):
            registry.take(1, "host-b", lease_s=1.0)
    with registry.take(1, "host-b") as again:
        assert again.number == 1


def test_a_server_that_was_killed_has_its_number_again_and_nobody_elses(registry: StoreRegistry) -> None:
    lasting = registry.take(None, "host-a")
    lasting.announce("host-a:50061", never)
    killed = registry.take(None, "host-b", lease_s=1.0)
    killed.announce("host-b:50061", never)
    die(killed)
    with registry.take(None, "host-b", lease_s=60.0) as again:
        assert again.number == 1
        again.announce("host-b:50999", never)
        assert registry.addresses(60.0) == ["host-a:50061", "host-b:50999"]
    lasting.close()


def test_a_server_that_was_not_heard_of_hears_that_another_one_has_its_number(registry: StoreRegistry) -> None:
    first = registry.take(0, "host-a", lease_s=1.0)
    heard, reasons = threading.Event(), list[str]()

    def lost(reason: str) -> None:
        reasons.append(reason)
        heard.set()

    first.announce("host-a:50061", lost)
    another = ("SET", registry.key(0), "secret host-b:50061")
    registry.change(registry.key(0), lambda held: [another])
    assert heard.wait(120)
    assert "store server 0 now, at host-b:50061" in reasons[0]
    first.close()
    assert registry.addresses(60.0) == ["host-b:50061"]  # closing gave back nothing that was another one's


def test_who_is_missing_is_named(redis_url: str, registry: StoreRegistry) -> None:
    with pytest.raises(Unavailable, match="no store server has registered"):
        registry.addresses(0.1)
    with registry.take(1, "host-b") as there:
        there.announce("host-b:50061", never)
        with (
            StoreRegistry(f"{redis_url}?namespace=elastable/test&count=3") as three,
            pytest.raises(Unavailable, match="of 3 store servers, number 0, 2 did not register"),
        ):
            three.addresses(0.1)
    # It has left, and may come back: a job must not begin with fewer.
    with pytest.raises(Unavailable, match=r"of 2 store servers, number 0, 1 \(last at host-b:50061\)"):
        registry.addresses(0.1)


def test_servers_are_waited_for(registry: StoreRegistry) -> None:
    found: list[list[str]] = []
    waiting = threading.Thread(target=lambda: found.append(registry.addresses(120.0)))
    waiting.start()
    with registry.take(0, "host-a") as late:
        late.announce("host-a:50061", never)
        waiting.join(120)
    assert found == [["host-a:50061"]]


def test_what_cannot_be_is_refused(redis_url: str) -> None:
    with pytest.raises(BadInput, match="count=0: write the number of store servers"):
        StoreRegistry(f"{redis_url}?count=0")
    with pytest.raises(BadInput, match="--number and --advertise need --register"):
        StoreServerOptions(number=1)
    options = JobOptions(CLICK_JOB, stores=("redis://a:1", "b:2"))
    assert len(RedisUrl.parse(",".join(options.stores)).seeds) == 2
    for stores in (options.stores, ("a:1", "b:2")):
        assert is_registry(",".join(stores)) == (stores == options.stores)
