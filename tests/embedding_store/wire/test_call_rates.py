"""What one client may ask of a server in a second."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.wire.server.call_room import CallRates


@given(
    most=st.sampled_from([0.25, 1.0, 7.0, 100.0]),
    calls=st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from(["one", "two"])), max_size=60),
)
def test_in_no_span_of_time_a_client_makes_more_than_its_share(most: float, calls: list[tuple[float, str]]) -> None:
    now = 1_000.0
    rates = CallRates(most, lambda: now)
    made: dict[str, list[float]] = defaultdict(list)
    for pause, client in calls:
        now += pause
        if rates.take(client):
            made[client].append(now)
        else:
            assert made[client], f"{client} was refused its first call"
    for times in made.values():
        for first, begun in enumerate(times):
            for last in range(first, len(times)):
                assert last - first + 1 <= max(most, 1.0) + most * (times[last] - begun) + 1e-6


def test_a_client_that_keeps_its_rate_is_never_refused() -> None:
    now = 0.0
    rates = CallRates(10.0, lambda: now)
    for number in range(1_000):
        now = number / 9.9
        assert rates.take("one")


def test_clients_that_are_gone_are_forgotten() -> None:
    now = 0.0
    rates = CallRates(10.0, lambda: now)
    for number in range(10_000):
        now = number * 1.0
        assert rates.take(f"client {number}")
    assert len(rates._paid) <= 4_096


def test_without_a_limit_nobody_is_refused() -> None:
    rates = CallRates(None)
    assert all(rates.take("one") for _ in range(1_000))
