"""Followers of store servers: versions that all of them have, of one commit, whichever of them dies."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.composite.store_servers import StoreServers, stand_in
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.engine import store_history
from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    ElastableError,
    FutureVersion,
    StaleVersion,
    StoreBroken,
    TableNotFound,
    Unavailable,
    Unsupported,
)
from elastable.embedding_store.open_store import open_follower, open_store
from elastable.embedding_store.shards import server_contract as shards
from elastable.embedding_store.store_reader import FollowedTable, HeldServers
from elastable.embedding_store.support.store_url import SERVERS
from tests.contracts.store_samples import create_tables
from tests.embedding_store.serving import serving
from tests.embedding_store.shards.served_shards import ServedShard, begin_job, served, stopped_with
from tests.ports import free_address
from tests.waiting import until

ANY, FIXED = TableSpec("any", 4, optimizer=OptimizerSpec.of("adagrad")), TableSpec("fixed", 6, 20)
IDS = {"any": np.arange(-3, 12), "fixed": np.arange(20)}


def push(version: int, seed: int = 0) -> shards.RowPush:
    random = np.random.default_rng([version, seed])
    part = {
        name: shards.Slices(random.permutation(ids)[:7], random.standard_normal((7, dim)).astype(np.float32))
        for (name, ids), dim in zip(IDS.items(), (4, 6), strict=True)
    }
    return shards.RowPush("job", version, 0, (part,))


def commit(version: int, record: bytes) -> shards.PushedCommit:
    sums = shards.RowSums(version, (shards.SumTerm(0, 0, 1.0),))
    return shards.PushedCommit(sums, version, {"any": 0.1, "fixed": 0.1}, record=record)


def make(store: StoreServers, version: int) -> None:
    store.push_rows(push(version))
    assert store.commit_pushed(commit(version, b"record of %d" % (version + 1))).missing == ()


def follower(servers: list[ServedShard]) -> HeldServers:
    found = open_follower(SERVERS + ",".join(server.address for server in servers), 60.0)
    assert isinstance(found, HeldServers)
    return found


def goes_on_to(found: HeldServers, version: int) -> None:
    until(lambda: found.advance() == version)


def assert_same_rows(found: HeldServers, store: EmbeddingStore) -> None:
    for name, rows in store.lookup(IDS).items():
        np.testing.assert_array_equal(found.lookup(IDS)[name], rows)
        wanted, held = (
            {int(key): row for block in of.scan(name) for key, row in zip(block.ids, block.slots, strict=True)}
            for of in (store, found)
        )
        assert wanted.keys() == held.keys()
        assert all(np.array_equal(held[key], row) for key, row in wanted.items())
        np.testing.assert_array_equal(found.read_rows(name, IDS[name]).ids, store.read_rows(name, IDS[name]).ids)


@pytest.fixture(params=["token", "encoding"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[ServedShard], StoreServers]]:
    """Version 1 of two servers."""
    with served(2, tmp_path, strategy="token" if request.param == "token" else "encoding") as (servers, store):
        specs = (ANY, FIXED) if request.param == "token" else (replace(ANY, optimizer=OptimizerSpec.of("sgd")), FIXED)
        create_tables(store, *specs)
        begin_job(store, "job")
        make(store, 0)
        yield servers, store


def test_every_version_is_that_of_all_servers(job: tuple[list[ServedShard], StoreServers]) -> None:
    servers, store = job
    with follower(servers) as found:
        assert_same_rows(found, store)
        before = found.lookup(IDS, 1)["any"]
        make(store, 1)
        until(lambda: found.newest() == 2)
        np.testing.assert_array_equal(found.lookup(IDS, 1)["any"], before)
        goes_on_to(found, 2)
        with found.at_one_version() as said:
            assert said == (2, b"record of 2")
        assert_same_rows(found, store)
        with pytest.raises(FutureVersion, match="read version 2 now"):
            found.lookup(IDS, 3)
        store.drop_table("any")
        store.create_table(replace(ANY, name="later", dim=3))
        make_alone(store)
        goes_on_to(found, 3)
        assert set(found.specs()) == {"fixed", "later"}
        with pytest.raises(TableNotFound):
            found.lookup({"any": IDS["any"]})
        assert found.lookup({"later": IDS["any"]})["later"].shape == (15, 3)


def make_alone(store: StoreServers) -> None:
    part = {"fixed": shards.Slices(np.arange(3), np.ones((3, 6), np.float32))}
    store.push_rows(shards.RowPush("job", 2, 0, (part,)))
    of_tables = replace(commit(2, b"record of 3"), learning_rates={"fixed": 0.1, "later": 0.1})
    assert store.commit_pushed(of_tables).missing == ()


@pytest.mark.parametrize("job", ["token"], indirect=True)
def test_what_one_server_lacks_may_be_taken_back(job: tuple[list[ServedShard], StoreServers]) -> None:
    """And is not mixed with what is made in its place."""
    servers, store = job
    with follower(servers) as found:
        first, second = found._shards
        store.push_rows(push(1, seed=1))
        store._servers[0].commit_pushed(commit(1, b"one"))
        until(lambda: first.log.newest() == 2)
        assert (found.newest(), found.advance()) == (1, 1)
        for server in store._servers:  # of version 1, as the master does that was started again
            server.recover(1)
        until(lambda: first.log.newest() == 1)
        store._servers[0].commit_pushed(commit(1, b"one"))
        until(lambda: first.log.newest() == 2)
        # Of another commit: this follower hears of it before it hears that the first one was taken back.
        store._servers[1].commit_pushed(commit(1, stand_in(b"another") or b""))
        until(lambda: second.log.newest() == 2)
        assert found.advance() == 1
        assert found.version() == 1
        store._servers[0].recover(1)
        store._servers[0].commit_pushed(commit(1, b"another"))
        goes_on_to(found, 2)
        with found.at_one_version() as said:
            assert said == (2, b"another")


def test_a_server_that_is_killed_is_no_outage(job: tuple[list[ServedShard], StoreServers]) -> None:
    servers, store = job
    with follower(servers) as found:
        before = found.lookup(IDS)["any"]
        servers[1].cut()
        with pytest.raises(ElastableError, match=servers[1].address):
            until(lambda: found.advance() and False)
        np.testing.assert_array_equal(found.lookup(IDS, 1)["any"], before)
        stopped_with(servers, 1)
        begin_job(store, "job")
        for version in (1, 2):
            make(store, version)

        def goes_on() -> bool:
            try:
                return found.advance() == 3
            except ElastableError:
                return False

        until(goes_on)
        assert_same_rows(found, store)


@pytest.mark.parametrize("job", ["token"], indirect=True)
def test_a_job_that_lost_versions_is_not_followed_back(job: tuple[list[ServedShard], StoreServers]) -> None:
    servers, store = job
    with follower(servers) as found:
        make(store, 1)
        goes_on_to(found, 2)
        store.recover(1)  # which all had
        with pytest.raises((StoreBroken, StaleVersion), match=r"version 2, which was there|was at version 2"):
            until(lambda: found.advance() and False)
        assert found.version() == 2


def test_what_does_not_fit_is_answered_by_nobody(
    job: tuple[list[ServedShard], StoreServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, store = job
    with follower(servers) as found:
        make(store, 1)
        until(lambda: found.newest() == 2)
        with monkeypatch.context() as patched:
            calls = iter([FollowedTable.put_images])
            put = FollowedTable.put_images

            def put_once(table: FollowedTable, *images: object) -> None:
                if next(calls, None) is None:
                    raise BadInput("it does not fit")
                put(table, *images)  # type: ignore[arg-type]

            patched.setattr(FollowedTable, "put_images", put_once)
            with pytest.raises(StoreBroken, match="it does not fit"):
                found.advance()
            with pytest.raises(StoreBroken, match="are read anew"), found.at_one_version():
                pass

        def goes_on() -> bool:
            try:
                return found.advance() == 2
            except ElastableError:
                return False

        until(goes_on)
        assert_same_rows(found, store)


@pytest.mark.parametrize("place", ["memory?log={}", "file://{}?flush=0.01"])
def test_a_store_behind_a_master_is_followed(place: str, tmp_path: Path) -> None:
    """Whatever is done to it by hand."""
    with open_store(place.format(tmp_path / "here")) as store, serving(store) as server:
        create_tables(store, ANY, FIXED)
        store.put("any", [RowBlock(np.arange(3), np.ones((3, 4), np.float32), np.ones((3, 4), np.float32))])
        with open_follower(f"grpc://{server.address}") as found:
            assert isinstance(found, HeldServers)
            assert_same_rows(found, store)
            gradients = {"any": TableUpdate(np.arange(-2, 2), np.ones((4, 4), np.float32))}
            store.update(gradients, {"any": 0.1, "fixed": 0.1})
            store.delete("any", np.array([2]))
            until(lambda: found.advance() == 1 and found.read_rows("any", np.array([2])).ids.size == 0)
            assert_same_rows(found, store)


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    nobody = free_address()
    with pytest.raises(Unavailable, match=nobody):
        open_follower(f"grpc://{nobody}", 2.0)
    with (
        MemoryStore() as store,
        serving(store) as server,
        pytest.raises(Unsupported, match=r"write memory\?log=/folder"),
    ):
        open_follower(f"grpc://{server.address}")
    with (
        open_store(f"file://{tmp_path}/files?log=none") as unlogged,
        serving(unlogged) as server,
        pytest.raises(Unsupported, match="log=none"),
    ):
        open_follower(f"grpc://{server.address}")
    with (
        served(2, tmp_path) as (_, servers),
        serving(servers) as server,
        pytest.raises(Unsupported, match="servers:host:port"),
    ):
        open_follower(f"grpc://{server.address}")


def test_servers_without_a_common_version_are_not_waited_for_without_end(tmp_path: Path) -> None:
    with served(2, tmp_path) as (servers, store):
        create_tables(store, ANY, FIXED)
        begin_job(store, "job")
        store.push_rows(push(0))
        store._servers[0].commit_pushed(commit(0, b"one"))
        with pytest.raises(DeadlineExceeded, match=r"sent no version within 0\.3 s"):
            open_follower(SERVERS + ",".join(server.address for server in servers), 0.3)


def test_a_follower_that_does_not_keep_up_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_history, "_MOST_UNSENT", 2_000)
    with closing(open_store(f"memory?log={tmp_path / 'log'}")) as opened:
        assert isinstance(opened, MemoryStore)
        store = opened
        create_tables(store, ANY)
        begin, following = store.follow()
        assert [change.begin for change in begin][-2:] == [True, False]
        for _ in range(20):
            store.update({"any": TableUpdate(np.arange(4), np.ones((4, 4), np.float32))}, {"any": 0.1})
        with pytest.raises(StaleVersion, match="bytes of changes were not taken: follow anew"):
            following.take().result(0)
        assert store._history is not None
        assert store._history._followers == []
        (_, another), gone = store.follow(), store.follow()[1]
        asked = gone.take()
        assert asked.cancel()
        for _ in range(2):
            store.update({"any": TableUpdate(np.arange(4), np.ones((4, 4), np.float32))}, {"any": 0.1})
        assert store._history._followers == [another]
        assert [change.version for change in another.take().result(0)] == [21, 22]


def test_who_takes_late_is_told_what_each_commit_made(tmp_path: Path) -> None:
    """What a commit logs lies in memory that the next one writes to."""
    with closing(open_store(f"memory?log={tmp_path / 'log'}")) as store:
        assert isinstance(store, MemoryStore)
        store.create_table(FIXED)
        begin, following = store.follow()
        tables = store_history.ReplayedTables({}, FollowedTable)
        for change in begin:
            if change.payload is not None:
                tables.apply_encoded(change.payload, change.version, "the beginning")
        seen = []
        for number in range(3):
            store.update(
                {"fixed": TableUpdate(np.arange(20), np.full((20, 6), 1.0 + number, np.float32))}, {"fixed": 0.1}
            )
            seen.append(store.lookup({"fixed": np.arange(20)})["fixed"])
        changes = following.take().result(0)
        assert len(changes) == 3
        for change, rows in zip(changes, seen, strict=True):
            assert change.payload is not None
            tables.apply_encoded(change.payload, change.version, "a change")
            found = np.empty((20, 6), np.float32)
            tables.tables["fixed"].read(np.arange(20), found)
            np.testing.assert_array_equal(found, rows)
