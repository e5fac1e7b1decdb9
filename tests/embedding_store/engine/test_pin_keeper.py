"""A pin outlives its lease while somebody keeps it, and no longer."""

import logging

import pytest

from elastable.embedding_store import MemoryStore, Unavailable
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.engine.pins import PinKeeper
from tests.contracts.store_samples import commit, fixed, int64, update
from tests.waiting import until

LEASE_S = 600.0  # which no machine is too slow for: what counts is that it begins anew


def filled() -> MemoryStore:
    store = MemoryStore(threads=1)
    store.create_table(fixed())
    commit(store, {"cities": update(int64(1, 2), 4)})
    return store


def until_renewed(store: MemoryStore) -> None:
    """Waits until the only lease begins anew, twice."""
    (lease,) = store._pins._leases[1]
    for _ in range(2):
        ends = lease.ends
        until(lambda: lease.ends > ends)  # noqa: B023 - it is waited for here


def test_a_pin_outlives_its_lease_until_its_keeper_is_closed() -> None:
    with filled() as store:
        pin = store.pin(lease_s=LEASE_S)
        with PinKeeper(pin, 0.01, "a test") as keeper:
            commit(store, {"cities": update(int64(3, 4), 4)})
            until_renewed(store)
            assert keeper.pin.row_count("cities") == 2
            assert keeper.gone is None
        assert store.pins() == ()
        keeper.close()


def test_a_pin_that_is_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with filled() as store, PinKeeper(store.pin(), 0.01, "a test") as keeper, caplog.at_level(logging.WARNING):
        commit(store, {"cities": update(int64(1, 2), 4)})
        keeper.pin.close()
        until(lambda: keeper.gone is not None)
        assert "the pin of version 1 is gone: it was released" in str(keeper.gone)
    assert caplog.messages == []


def test_a_store_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled() as store:
        pin = store.pin(lease_s=LEASE_S)
        renew, failures = pin.renew, [Unavailable("redis at 1.2.3.4 broke")]

        def away(lease_s: float | None = None) -> None:
            if failures:
                raise failures.pop()
            renew(lease_s)

        def broken(self: Snapshot) -> None:
            raise Unavailable("redis at 1.2.3.4 is gone")

        monkeypatch.setattr(pin, "renew", away)
        with caplog.at_level(logging.WARNING), PinKeeper(pin, 0.01, "a test") as keeper:
            until_renewed(store)
            assert keeper.gone is None
            assert [kept_pin.version for kept_pin in store.pins()] == [1]
            monkeypatch.setattr(type(pin), "close", broken)
        monkeypatch.undo()
        assert caplog.messages == [
            "the pin for a test was not renewed: redis at 1.2.3.4 broke",
            "the pin for a test ends with its lease: redis at 1.2.3.4 is gone",
        ]
