"""A writer may die after every single write: whoever comes next finds one whole version, and goes on to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import redis

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.errors import StaleVersion, StoreFailed
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from tests.embedding_store.disturbed_job import IDS, SPECS, commit_of, everything, undisturbed
from tests.embedding_store.dying_writer import Died, dying_after

pytestmark = pytest.mark.process

ALL = dict.fromkeys(SPECS, IDS)
_MOST = 200


def with_record(version: int) -> Commit:
    return replace(commit_of(version), record=b"record %d" % version)


@pytest.fixture(params=["redis_url", "valkey_url", "redis_cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def whole() -> Callable[[int], tuple[object, dict[str, bytes]]]:
    """What an undisturbed store holds at a version: all rows with their slots, and what lookups give."""
    known: dict[int, tuple[object, dict[str, bytes]]] = {}

    def told(version: int) -> tuple[object, dict[str, bytes]]:
        if version not in known:
            with undisturbed(version) as store:
                known[version] = everything(store), looked_up(store)
        return known[version]

    return told


Whole = Callable[[int], tuple[object, dict[str, bytes]]]


def looked_up(source: RedisReader | Snapshot, version: int | None = None) -> dict[str, bytes]:
    return {name: rows.tobytes() for name, rows in source.lookup(ALL, version).items()}


def made(url: str, versions: int) -> RedisStore:
    store = RedisStore(url)
    for spec in SPECS.values():
        store.create_table(spec)
    for version in range(1, versions + 1):
        store.commit(with_record(version))
    return store


def require_whole(store: RedisStore, version: int, whole: Whole) -> None:
    assert store.version() == version
    assert (everything(store), looked_up(store, version)) == whole(version)
    assert store.record() == b"record %d" % version


def goes_on(store: RedisStore, whole: Whole) -> None:
    for version in range(store.version() + 1, 5):
        store.commit(with_record(version))
    require_whole(store, 4, whole)


@pytest.mark.parametrize("pinned", [False, True], ids=["no pin", "pinned"])
def test_a_commit_at_every_point(url: str, pinned: bool, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    seen, partitions = list[int](), 4
    for writes in count(1):
        assert writes < _MOST
        place = f"{url}?namespace=crash/{writes}&partitions={partitions}"
        with made(place, 2) as store, RedisReader(place) as reader:
            pin = store.pin() if pinned else None
            try:
                with dying_after(monkeypatch, writes):
                    store.commit(with_record(3))
                break
            except Died:
                pass
            current = reader.version()
            seen.append(current)
            try:
                assert looked_up(reader, current) == whole(current)[1]
            except StaleVersion:
                assert (current, pinned) == (2, False)
            with RedisStore(place) as successor:
                taken = successor.recover()
                assert (taken > 0) == (current == 2)
                require_whole(successor, current, whole)
                assert successor.recover() == 0
                if pin is not None:
                    assert looked_up(reader, 2) == looked_up(successor, 2) == whole(2)[1]
                goes_on(successor, whole)
                if pin is not None:
                    assert looked_up(reader, 2) == whole(2)[1]
    # Three tables in so many partitions, and the version last of all.
    assert seen == [2] * 3 * partitions + [3]


@pytest.mark.parametrize("back", [False, True], ids=["of a broken commit", "of a whole commit"])
def test_a_recovery_at_every_point(redis_url: str, back: bool, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    """`back`: the newest whole commit is taken back as well."""
    died = 0
    for writes in count(1):
        assert writes < _MOST
        place = f"{redis_url}?namespace=recovery/{writes}&partitions=4"
        with made(place, 2) as store:
            if back:
                store.commit(with_record(3))
            else:
                with pytest.raises(Died), dying_after(monkeypatch, 9):
                    store.commit(with_record(3))
        with RedisStore(place) as successor:
            try:
                with dying_after(monkeypatch, writes):
                    successor.recover(2)
                break
            except Died:
                died += 1
        with RedisStore(place) as another:
            another.recover(2)
            require_whole(another, 2, whole)
            goes_on(another, whole)
    assert died >= (12 if back else 9)


def test_first_commits_at_every_point(redis_url: str, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    """Every row is new: taken back, it is not there."""
    for writes in range(1, 13, 4):
        place = f"{redis_url}?namespace=first/{writes}&partitions=4"
        with made(place, 0) as store, pytest.raises(Died), dying_after(monkeypatch, writes):
            store.commit(with_record(1))
        with RedisStore(place) as successor:
            assert successor.recover() > 0
            assert successor.version() == 0
            assert [successor.row_count(name) for name in SPECS] == [0, 0, 0]
            assert successor.record() is None
            goes_on(successor, whole)


def test_a_recovery_that_is_not_needed(url: str, whole: Whole) -> None:
    with made(f"{url}?partitions=4", 2) as store:
        assert store.recover() == 0
        assert store.recover(2) == 0
        require_whole(store, 2, whole)
        with pytest.raises(StaleVersion, match="version 0 is past"):
            store.recover(0)


def test_a_version_is_taken_back_once(redis_url: str, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    with made(f"{redis_url}?partitions=4", 3) as store:
        assert store.recover(2) == sum(len(update.ids) for update in commit_of(3).updates.values())
        require_whole(store, 2, whole)
        with pytest.raises(StaleVersion, match="cannot go back to version 1"):
            store.recover(1)  # the commit of version 3 dropped what version 2 found
        store.commit(with_record(3))
        with pytest.raises(Died), dying_after(monkeypatch, 5):
            store.commit(with_record(4))
    with RedisStore(f"{redis_url}?partitions=4") as successor:
        with pytest.raises(StaleVersion, match="cannot go back to version 2: the commit after the next one has begun"):
            successor.recover(2)
        successor.recover()
        require_whole(successor, 3, whole)
        ids = np.arange(5)
        successor.delete("adam", ids)
        with pytest.raises(StaleVersion, match=r"cannot go back to version 2: rows were put, deleted or declared"):
            successor.recover(2)


def test_a_lost_before_image_is_named(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(f"{redis_url}?partitions=4", 2) as store, pytest.raises(Died), dying_after(monkeypatch, 1):
        store.commit(with_record(3))
    with redis.Redis.from_url(redis_url) as client, RedisStore(redis_url) as successor:
        for key in client.scan_iter("*}:before"):
            client.delete(key)
        with pytest.raises(StoreFailed, match=r"partition \d of table .* bears version 3, and has no before-images"):
            successor.recover()
