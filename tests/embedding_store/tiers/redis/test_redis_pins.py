"""Pins of a store in Redis beyond the contract: other processes read them, they cost no more than allowed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, StaleVersion, StoreFailed
from elastable.embedding_store.tiers.redis.before_images import Moment
from elastable.embedding_store.tiers.redis.pinned_reader import PinnedReader
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.registry import PinEntry, Registry
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, prepared, undisturbed
from tests.embedding_store.dying_writer import Died, dying_after
from tests.waiting import until

pytestmark = pytest.mark.process

ALL = dict.fromkeys(SPECS, IDS)


def rows_of(source: RedisReader, version: int | None = None) -> dict[str, bytes]:
    return {name: rows.tobytes() for name, rows in source.lookup(ALL, version).items()}


def images_in(client: redis.Redis) -> int:
    """Before-images of all partitions."""
    return sum(len({field[:16] for field in client.hkeys(key)}) for key in client.scan_iter("*}:before", 1000)
               if key != b"{elastable}:before")  # fmt: skip


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def test_every_reader_sees_a_pin_and_a_new_master_keeps_it(redis_url: str) -> None:
    with prepared(redis_url) as store, RedisReader(redis_url) as reader:
        before = rows_of(reader)
        pin = store.pin(lease_s=600)
        store.commit(commit_of(2))
        assert rows_of(reader, 1) == before
        with RedisStore(redis_url) as successor:
            assert [told.version for told in successor.pins()] == [1]
            for version in range(3, 6):
                successor.commit(commit_of(version))
                assert rows_of(reader, 1) == rows_of(successor, 1) == before
            with RedisReader(redis_url) as fresh:
                assert rows_of(fresh, 1) == before
            assert rows_of(reader) == rows_of(successor, 5) != before
            told = {name: pin.lookup({name: IDS})[name].tobytes() for name in SPECS}
            assert told == before
            pin.close()
            with pytest.raises(StaleVersion, match="version 1 is past"):
                rows_of(reader, 1)


def test_what_no_pin_needs_is_dropped(redis_url: str, client: redis.Redis) -> None:
    with prepared(redis_url) as store:
        for version in range(2, 5):
            store.commit(commit_of(version))
        steady = images_in(client)
        assert steady <= 3 * 64
        old, new = store.pin(), None
        for version in range(5, 9):
            store.commit(commit_of(version))
            new = new or store.pin()
        kept = images_in(client)
        assert kept > 2.5 * steady
        old.close()
        store.commit(commit_of(9))
        between = images_in(client)
        assert between < kept
        assert rows_of(store, 5) == {name: rows.tobytes() for name, rows in undisturbed(5).lookup(ALL).items()}
        assert new is not None
        new.close()
        for version in range(10, 12):
            store.commit(commit_of(version))
        assert images_in(client) <= steady + 8
        assert len(client.hkeys("{elastable}:before")) == 1
        assert client.hlen("{elastable}:pins") == 0


def test_a_pin_of_a_dead_reader_ends_with_its_lease(redis_url: str, client: redis.Redis) -> None:
    with prepared(redis_url) as store:
        store.pin(lease_s=0.05)
        until(lambda: not store.pins())
        store.commit(commit_of(2))
        assert client.hlen("{elastable}:pins") == 0
        with pytest.raises(StaleVersion, match="no version is pinned"):
            store.lookup(ALL, 1)


def test_a_pin_that_costs_too_much_is_given_up_by_name(redis_url: str) -> None:
    with prepared(f"{redis_url}?before_image_bytes=20KiB") as store, RedisReader(redis_url) as reader:
        first = store.pin()
        store.commit(commit_of(2))
        second = store.pin()
        (told, _) = store.pins()
        assert 5_000 < told.bytes < 20_480
        version = 2
        while len(store.pins()) == 2:
            version += 1
            store.commit(commit_of(version))
        gone = r"before-images of what is pinned would take \d+ bytes, and before_image_bytes allows 20480"
        with pytest.raises(StaleVersion, match=rf"the pin of version 1 is gone: it was given up, as {gone}"):
            first.lookup(ALL)
        with pytest.raises(StaleVersion, match=rf"version 1 is past \(its pin is gone: .*{gone}"):
            reader.lookup(ALL, 1)
        expected = undisturbed(2).lookup(ALL)
        for name, rows in second.lookup(ALL).items():
            np.testing.assert_array_equal(rows, expected[name])


def test_a_pinned_version_that_is_taken_back(redis_url: str) -> None:
    with prepared(redis_url) as store:
        old = store.pin()
        store.commit(commit_of(2))
        new = store.pin()
        store.recover(1)
        with pytest.raises(StaleVersion, match="the commit of version 2 was taken back"):
            new.lookup(ALL)
        store.commit(commit_of(2))
        store.commit(commit_of(3))
        assert {n: r.tobytes() for n, r in old.lookup(ALL).items()} == rows_of_undisturbed(1)
        assert everything(store) == everything(undisturbed(3))


def rows_of_undisturbed(version: int) -> dict[str, bytes]:
    return {name: rows.tobytes() for name, rows in undisturbed(version).lookup(ALL).items()}


def test_another_commit_of_the_same_version_after_a_pin(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has fetched what a broken commit left must not take it for what the next one leaves."""
    with prepared(f"{redis_url}?partitions=1") as store, RedisReader(redis_url) as reader:
        expected = rows_of(reader)
        store.pin(lease_s=600)
        broken = Commit(2, {"adam": TableUpdate(IDS[:50], np.ones((50, 6), np.float32))}, 1, {})
        with pytest.raises(Died), dying_after(monkeypatch, 1):
            store.commit(broken)
        assert rows_of(reader, 1) == expected
        with RedisStore(redis_url) as successor:
            successor.commit(Commit(2, {"adam": TableUpdate(IDS[40:], np.ones((160, 6), np.float32))}, 1, {}))
            assert rows_of(reader, 1) == expected


def test_more_changes_than_are_asked_for_blindly(redis_url: str) -> None:
    spec = TableSpec("t", 2, None, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))
    ids, ones = np.arange(8), np.ones((1, 2), np.float32)
    with RedisStore(f"{redis_url}?partitions=2") as store, RedisReader(redis_url) as reader:
        store.create_table(spec)
        before = reader.lookup({"t": ids})["t"]
        with store.pin():
            for version in range(1, 80):
                store.commit(Commit(version, {"t": TableUpdate(ids[version % 8][None], ones)}, version - 1, {}))
            np.testing.assert_array_equal(reader.lookup({"t": ids}, 0)["t"], before)
            store.put("t", [RowBlock(ids[:2], np.zeros((2, 2), np.float32), np.empty((2, 0), np.float32))])
            np.testing.assert_array_equal(reader.lookup({"t": ids}, 0)["t"], before)
            assert (reader.lookup({"t": ids}, 79)["t"] != before).all()


def test_what_readers_keep_is_bounded(redis_url: str) -> None:
    with prepared(redis_url) as store:
        pin = store.pin()
        store.commit(commit_of(2))
        expected = rows_of_undisturbed(1)
        store._pinned = PinnedReader(store._topology, store.url.namespace, kept_bytes=1)
        for _ in range(3):
            assert {n: r.tobytes() for n, r in pin.lookup(ALL).items()} == expected
            assert not store._pinned._layers


def test_no_pin_while_rows_are_put(redis_url: str, client: redis.Redis) -> None:
    with prepared(f"{redis_url}?deadline=0.3") as store:
        client.set("{elastable}:serial", 1)
        with pytest.raises(DeadlineExceeded, match="put or deleted"):
            store.pin()
        store.commit(commit_of(2))  # nobody is at it any more
        store.pin().close()


def test_before_images_that_were_lost(redis_url: str, client: redis.Redis) -> None:
    with prepared(redis_url) as store, store.pin() as pin:
        store.commit(commit_of(2))
        for key in list(client.scan_iter("*}:before")):
            if key != b"{elastable}:before":
                client.delete(key)
        with pytest.raises(
            StoreFailed, match=r"has lost before-images of partition \d+ of table '.*', which version 1"
        ):
            pin.lookup(ALL)


def test_a_registry_that_holds_something_else(redis_url: str, client: redis.Redis) -> None:
    with prepared(redis_url) as store:
        client.hset("{elastable}:pins", "x", "?")
        with pytest.raises(StoreFailed, match="no pin"):
            store.pins()
        client.delete("{elastable}:pins")
        client.hset("{elastable}:before", "x", "?")
        with pytest.raises(StoreFailed, match="ledger of before-images"):
            store.recover()


def test_readers_beside_a_master_that_breaks_off_and_goes_on(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is committed, broken off and taken back: a pinned version is read exactly, in every moment."""
    place = f"{redis_url}?partitions=4"
    with prepared(place) as store:
        store.pin(lease_s=600)
    expected, done, failures, reads = rows_of_undisturbed(1), threading.Event(), list[str](), [0]

    def read() -> None:
        try:
            with RedisReader(place) as reader:
                while not done.is_set():
                    reads[0] += 1
                    if rows_of(reader, 1) != expected:
                        failures.append("version 1 was read otherwise")
        except Exception as error:  # noqa: BLE001 - told by the test
            failures.append(repr(error))

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(12):
            with RedisStore(place) as store:
                version = store.version() + 1
                broken = {name: u for name, u in commit_of(100 + turn).updates.items() if name == "adam"}
                store.recover()
                with pytest.raises(Died), dying_after(monkeypatch, 1 + turn % 4):
                    store.commit(Commit(version, broken, version - 1, {}))
            with RedisStore(place) as store:
                store.commit(commit_of(version))
    finally:
        done.set()
        for reader in readers:
            reader.join(60)
    assert failures == []
    assert reads[0] > 4
    with RedisReader(place) as last:
        assert rows_of(last) == rows_of_undisturbed(13)


def test_the_words_of_the_registry() -> None:
    entry = PinEntry(5, 2, 1_000, 0.5)
    assert PinEntry.from_json(entry.to_json().encode()) == entry
    told = Registry(7, b"x", 2, {b"a": entry, b"b": PinEntry(4, 0, 900, 1.0)}, 950)
    assert told.oldest_pin() == Moment(5, 2)
    assert told.standing() == {b"a": entry}
    with pytest.raises(BadInput, match=re.escape("it cannot be while versions are pinned (5)")):
        told.refuse_pins("it cannot be")
