"""`elastable log` shows what a log holds, finds what is corrupt, and cuts it."""

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_tier import StoreTier
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreBroken, StoreFailed
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.master.checkpoints.jobs import flip
from tests.servers import Server


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["log", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> str:
    folder = tmp_path / "log"
    with open_store(f"memory?log={folder}") as store:
        store.create_table(TableSpec("t", 2))
        for version in range(1, 6):
            commit(store, version)
    return str(folder)


def test_a_log_is_shown(folder: str) -> None:
    output = json.loads(run("show", folder, "--json"))
    assert output == {
        "base": None,
        "base_version": 0,
        "base_bytes": 0,
        "first": 1,
        "last": 6,
        "version": 5,
        "bytes": sum(path.stat().st_size for path in Path(folder).glob("*.log")),
        "torn_bytes": 0,
        "changes": {"CreateTable": 1, "CommitImages": 5},
        "rows": 15,
        "flushed": 0,
    }
    shown = run("show", folder)
    assert "CommitImages" in shown
    assert "1 to 6" in shown


def test_a_log_is_verified_while_a_store_has_it_open(folder: str) -> None:
    with open_store(f"memory?log={folder}"):
        assert run("verify", folder) == "whole: entries 1 to 6, version 5\n"


def test_a_torn_entry_is_reported_and_stays(folder: str) -> None:
    (newest,) = Path(folder).glob("*.log")
    content = newest.read_bytes()
    newest.write_bytes(content + b"torn")
    assert "4 bytes of a torn entry will be dropped" in run("verify", folder)
    assert newest.read_bytes() == content + b"torn"


def test_a_corrupt_log_is_named(folder: str) -> None:
    (newest,) = Path(folder).glob("*.log")
    flip(newest, 60)
    with pytest.raises(StoreBroken, match=f"{newest.name} is corrupt at byte 0"):
        run("verify", folder)


def test_what_is_no_log_is_refused_and_stays_empty(tmp_path: Path) -> None:
    for command in (("show",), ("verify",), ("truncate", "--version", "1")):
        with pytest.raises(BadInput, match="holds no log"):
            run(command[0], str(tmp_path), *command[1:])
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreFailed, match="cannot be read"):
        run("show", str(tmp_path / "nowhere"))


def test_a_log_goes_back_to_a_version(folder: str) -> None:
    assert run("truncate", folder, "--version", "3") == ("version 3, entries 1 to 4; 9 written rows were taken back\n")
    with open_store(f"memory?log={folder}") as store:
        assert (store.version(), store.row_count("t")) == (3, 3)
        with pytest.raises(StoreFailed, match="open already"):
            run("truncate", folder, "--version", "1")


def test_a_log_does_not_go_back_before_its_base(folder: str) -> None:
    with open_store(f"memory?log={folder}&log_bytes=1") as store:
        store.commit(Commit(6, {}, 5, {}))
        store._history._writing.join(60)  # type: ignore[attr-defined]
    with pytest.raises(StaleVersion, match="its base is newer"):
        run("truncate", folder, "--version", "5")


@contextmanager
def tiered(url: str) -> Iterator[MemoryStore]:
    """A store with rows and log in Redis, flushed on request, that ends as if its process were killed."""
    with closing(RedisPlace(url)) as place, RedisLog(place) as log:
        store = MemoryStore()
        store.keep_tier(StoreTier(RedisTier(place), log, 1 << 20), every_s=1e6)
        yield store
        store._flusher.stop()  # type: ignore[union-attr]


def commit(store: EmbeddingStore, version: int) -> None:
    update = TableUpdate(np.arange(version), np.ones((version, 2), np.float32))
    store.commit(Commit(version, {"t": update}, version - 1, {}))


@pytest.fixture(name="in_redis")
def fixture_in_redis(redis_url: str) -> str:
    with tiered(redis_url) as store:
        store.create_table(TableSpec("t", 2))
        for version in range(1, 4):
            commit(store, version)
        store.flush(60)
        for version in range(4, 7):
            commit(store, version)
    return redis_url


def test_a_log_in_redis_is_shown_and_verified(in_redis: str) -> None:
    output = json.loads(run("show", in_redis, "--json"))
    assert (output["first"], output["last"], output["flushed"]) == (4, 7, 4)
    assert (output["version"], output["base_version"], output["changes"]) == (6, 3, {"CommitImages": 4})
    assert output["rows"] == 3 + 4 + 5 + 6
    assert "version 3, entry 4: rows are in the store up to there" in run("show", in_redis)
    assert run("verify", in_redis.replace("://", "://default:@")) == "whole: entries 4 to 7, version 6\n"
    with tiered(in_redis) as store:
        commit(store, 7)
        assert run("verify", in_redis) == "whole: entries 4 to 8, version 7\n"
        store.flush(60)
        assert run("verify", in_redis) == "whole: entries 8 to 8, version 7\n"


def test_a_log_in_redis_that_is_corrupt_is_named(in_redis: str, redis_node: Server) -> None:
    with redis_node.client() as client:
        client.xdel("{elastable}:log", "6-0")
        with pytest.raises(StoreBroken, match="corrupt at stream entry 6-0: it is missing, and 7-0 is the next one"):
            run("verify", in_redis)
        client.xdel("{elastable}:log", "4-0", "5-0")
        with pytest.raises(StoreBroken, match=r"is incomplete: .*its state of those up to 4, and its log holds 7 to 7"):
            run("verify", in_redis)


def test_where_no_store_is_in_redis_nothing_is_made(redis_url: str, redis_node: Server) -> None:
    for command in (("show",), ("verify",), ("truncate", "--version", "1")):
        with pytest.raises(BadInput, match="holds no log"):
            run(command[0], redis_url, *command[1:])
    with redis_node.client() as client:
        assert client.dbsize() == 0


def test_a_log_in_redis_goes_back_to_a_version(in_redis: str) -> None:
    assert run("truncate", in_redis, "--version", "5") == (
        "version 5, entries 4 to 6; 6 written rows were taken back\n"
    )
    with tiered(in_redis) as store:
        assert (store.version(), store.row_count("t")) == (5, 5)
        commit(store, 6)
        with pytest.raises(StoreFailed, match=rf"is open in process \S+:{os.getpid()}: end it first"):
            run("truncate", in_redis, "--version", "5")
        store.flush(60)
    with pytest.raises(StaleVersion, match="cannot go back to version 5: rows of later versions are written"):
        run("truncate", in_redis, "--version", "5")
    with tiered(in_redis) as store:
        assert store.version() == 6
