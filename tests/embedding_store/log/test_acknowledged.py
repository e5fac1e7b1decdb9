"""A store that has lost what it acknowledged is refused with both versions, and opened where that is accepted."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import Commit, TableSpec, TableUpdate
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import BadInput, StoreBroken, StoreFailed, TakenOver
from elastable.embedding_store.log.acknowledged import AcknowledgedFile, Noted
from elastable.embedding_store.log.contract import NoLog
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.support.store_url import url_of_server
from elastable.embedding_store.tables.table import BaseStore
from tests.servers import Server

SPEC = TableSpec("t", 4)
IDS = np.arange(50)


def commit_of(version: int) -> Commit:
    return Commit(version, {"t": TableUpdate(IDS, np.full((50, 4), version, np.float32))}, version, {})


@dataclass
class Place:
    """A store, and how what was appended last is taken from it.

    Attributes:
        keep: Keeps the store, which is closed, as it is.
        back: Brings it back to that.
        lose: Deletes all of it.
    """

    url: str
    home: Path
    keep: Callable[[], object]
    back: Callable[[], object]
    lose: Callable[[], object]

    def open(self, more: str = "") -> BaseStore:
        return open_store(f"{self.url}{more}", acknowledged_in=self.home)


def copied(home: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    store, copy = home / "store", home / "copy"

    def back() -> None:
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(copy, store)

    return lambda: shutil.copytree(store, copy), back


def segments_lost(store: Path) -> None:
    """Deletes the segment that was written last."""
    max(store.rglob("*.log")).unlink()


@pytest.fixture(params=["memory", "file", pytest.param("redis", marks=pytest.mark.process)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "redis":
        node, url = request.getfixturevalue("redis_node"), request.getfixturevalue("redis_url")
        kept = list[tuple[bytes, bytes]]()
        with node.client() as client:

            def keep() -> None:
                kept.extend((key, client.dump(key)) for key in client.scan_iter())

            def back() -> None:
                client.flushall()
                for key, content in kept:
                    client.restore(key, 0, content)

            yield Place(f"{url}?flush=1000", tmp_path, keep, back, client.flushall)
        return
    keep_copy, copy_back = copied(tmp_path)
    urls = {"memory": f"memory?log={tmp_path}/store", "file": f"file://{tmp_path}/store?flush=1000"}
    yield Place(urls[request.param], tmp_path, keep_copy, copy_back, lambda: shutil.rmtree(tmp_path / "store"))


def committed(place: Place, first: int, last: int) -> None:
    with place.open() as store:
        store.create_table(SPEC)
        for version in range(first, last + 1):
            store.commit(commit_of(version))


def test_a_store_that_went_back_is_refused_with_both_versions(place: Place) -> None:
    committed(place, 1, 2)
    place.keep()
    committed(place, 3, 5)
    place.back()
    with pytest.raises(StoreBroken, match=r"at version 2 .*version 5 .*was acknowledged, as .*\.acknowledged says"):
        place.open()
    with pytest.raises(StoreBroken, match="write accept_version=2"):  # the loss of another version is not accepted
        place.open("&accept_version=4")
    with place.open("&accept_version=2") as store:
        assert store.version() == 2
    with place.open("&accept_version=2") as store:  # and nothing is left to accept
        store.commit(commit_of(3))
    with place.open() as store:
        assert store.version() == 3


def test_a_store_that_is_gone_is_no_empty_store(place: Place) -> None:
    committed(place, 1, 2)
    place.lose()
    with pytest.raises(StoreBroken, match=r"at version 0 \(log entry 0\), but version 2 "):
        place.open()
    with place.open("&accept_version=0") as store:
        assert not store.specs()


def test_another_store_in_its_place_is_refused(place: Place) -> None:
    """As new, or newer: it was never this one."""
    with place.open() as other:
        other.create_table(SPEC)
        for version in range(1, 8):
            other.commit(Commit(version, {"t": TableUpdate(IDS[:9], np.ones((9, 4), np.float32))}, version, {}))
    place.keep()
    place.lose()
    (noted,) = place.home.glob("*.acknowledged")
    noted.unlink()
    committed(place, 1, 3)
    place.back()
    with pytest.raises(StoreBroken, match=r"at version 7 .*, but version 3 of another store was acknowledged"):
        place.open()


def test_a_version_that_is_taken_back_is_not_missed(place: Place) -> None:
    with place.open() as store:
        store.create_table(SPEC)
        store.commit(commit_of(1))
        store.stage(commit_of(2))()
        store.recover(1)
    with place.open() as store:
        assert store.version() == 1


def test_a_broken_store_that_gives_way_is_forgotten(place: Place) -> None:
    committed(place, 1, 2)
    place.keep()
    committed(place, 3, 5)
    place.back()
    asked = list[str]()
    with open_store(
        place.url, acknowledged_in=place.home, on_broken=lambda error, _: asked.append(str(error))
    ) as store:
        assert "version 5" in asked[0]
        assert store.version() == 0
    place.open().close()


def test_the_newest_segment_deleted(tmp_path: Path) -> None:
    """Of a log of several segments, whose writer was killed."""
    url = f"memory?log={tmp_path}/store&log_bytes=20000"
    store = open_store(url)
    store.create_table(SPEC)
    for version in range(1, 9):
        store.commit(commit_of(version))
    assert len(list(tmp_path.rglob("*.log"))) > 1
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    shutil.copy(tmp_path / "store.acknowledged", tmp_path / "killed.acknowledged")
    store.close()
    segments_lost(tmp_path / "killed")
    with pytest.raises(StoreBroken, match=r"at version \d .*, but version 8 .*was acknowledged"):
        open_store(url.replace("store", "killed"))


@pytest.mark.process
def test_the_url_of_a_store_in_redis_says_where_it_is_noted(redis_node: Server, redis_url: str, tmp_path: Path) -> None:
    """As `elastable serve`, `elastable store` and `et.fit` open it: by nothing but its URL."""
    url = url_of_server(f"{redis_url}?acknowledged_in={tmp_path}/notes", 3)
    with open_store(url) as store:
        store.create_table(SPEC)
        store.commit(commit_of(1))
    (noted,) = (tmp_path / "notes").iterdir()
    with redis_node.client() as client:
        client.flushall()
    with pytest.raises(StoreBroken, match=rf"at version 0 .*, but version 1 .*was acknowledged, as {noted} says"):
        open_store(url)
    open_store(url_of_server(f"{redis_url}?acknowledged_in={tmp_path}/notes", 2)).close()  # another server's share
    open_store(f"{url}&accept_version=0").close()


@pytest.mark.parametrize("url", ["file:///a?acknowledged_in=/b", "redis://h:1?acknowledged_in=b"])
def test_where_it_is_noted_is_a_folder_of_a_store_in_redis(url: str) -> None:
    with pytest.raises(BadInput, match=r"acknowledged_in=.*write it in the URL of a store in Redis"):
        open_store(url)


@pytest.mark.process
@pytest.mark.parametrize("left", [0, 3])
def test_the_newest_stream_entries_deleted(redis_node: Server, redis_url: str, left: int) -> None:
    """Nothing is noted anywhere: the stream itself remembers its last id."""
    url = f"{redis_url}?flush=1000"
    dead = open_store(url)
    dead.create_table(SPEC)
    for version in range(1, 5):
        dead.commit(commit_of(version))
    with redis_node.client() as client:
        for entry, _ in client.xrange("{elastable}:log")[left:]:
            client.xdel("{elastable}:log", entry)
    version = max(0, left - 1)
    with pytest.raises(StoreBroken, match=rf"at version {version} \(log entry {left}\), but log entry 5 was appended"):
        open_store(url)
    with open_store(f"{url}&accept_version={version}") as store:
        store.create_table(SPEC)
        store.commit(commit_of(version + 1))
    with open_store(url) as store:
        assert store.version() == version + 1
    with pytest.raises(TakenOver):
        dead.close()


def test_the_file_is_its_owners_and_a_corrupt_one_is_refused(tmp_path: Path) -> None:
    url, noted = f"memory?log={tmp_path}/store", tmp_path / "store.acknowledged"
    with open_store(url) as store:
        store.create_table(SPEC)
    assert stat.S_IMODE(noted.stat().st_mode) == 0o600
    text = noted.read_bytes()
    for wrong in (b"?" * len(text), text.replace(b"entry 1", b"entry 2"), text[:-1], text * 2):
        noted.write_bytes(wrong)
        with pytest.raises(StoreFailed, match=r"is corrupt.*remove it to go without it"):
            open_store(url)
    noted.unlink()
    open_store(url).close()


def test_a_file_that_cannot_be_written_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store.acknowledged").symlink_to(tmp_path / "elsewhere")
    with open_store(f"memory?log={tmp_path}/store") as store:
        store.create_table(SPEC)
        store.commit(commit_of(1))
    assert caplog.text.count("what the store loses may not be noticed") == 1
    assert not os.path.lexists(tmp_path / "elsewhere")


def test_without_a_file_nothing_is_noted() -> None:
    acknowledged, nowhere = AcknowledgedFile(None), NoLog(3)
    acknowledged.put(Noted(5, 5, 0))
    acknowledged.identify("a")
    acknowledged.require(nowhere, Noted(1, 3, 0), "the store")
    acknowledged.forget()


def test_a_truncated_log_is_the_stores_newest(tmp_path: Path) -> None:
    with open_store(f"memory?log={tmp_path}/store") as store:
        store.create_table(SPEC)
        for version in range(1, 4):
            store.commit(commit_of(version))
    with StoreHistory(tmp_path / "store") as history:
        history.take_back(1)
    with open_store(f"memory?log={tmp_path}/store") as store:
        assert store.version() == 1


@pytest.mark.parametrize("text", ["x", "-1", "", "1" * 20])
@pytest.mark.parametrize("url", ["memory?log=/a&", "file:///a?", "redis://h:1?"])
def test_an_accepted_version_is_a_number(url: str, text: str) -> None:
    with pytest.raises(BadInput, match=r"accept_version=.*write the version that the error has named"):
        open_store(f"{url}accept_version={text}")
