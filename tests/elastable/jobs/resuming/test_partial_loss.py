"""A store that has lost a part of its rows is refused; a job that is resumed goes on from its checkpoint in it."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, CheckpointError, StoreBroken, StoreFailed, Unsupported
from elastable.embedding_store.open_store import open_store
from elastable.jobs.options import JobOptions
from elastable.jobs.resuming.resume import Beginning, JobStart
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.commits.dense_part import DensePart
from tests.elastable.conftest import JOB as OPTIONS
from tests.elastable.conftest import Trained
from tests.elastable.processes import CLICK_JOB, Hold, elastable, succeeded
from tests.master.checkpoints.jobs import (
    AGED,
    DYNAMIC,
    FIXED,
    JOB,
    Rows,
    commit,
    created,
    dense_of,
    flip,
    progress_of,
    rows,
    train,
)
from tests.servers import Server, running_cluster, running_server

SPECS = (FIXED, DYNAMIC, AGED)
RESUMING = JobOptions(Path("job.py"), resume=True, checkpoint_dir="kept")


class Dense(DensePart):
    def restore(self, tensors: object) -> None:
        """See `DenseState`."""


def resumed(url: str, home: Path, job: JobSpec = JOB) -> tuple[EmbeddingStore, Beginning]:
    start = JobStart(RESUMING, job, {spec.name: spec for spec in SPECS}, open_checkpoint(home))
    store = open_store(url, on_broken=start.give_way)
    return store, start.fill(store, Dense())  # type: ignore[arg-type]


def trained_in(url: str, home: Path, midway: Callable[[], object] = lambda: None) -> Rows:
    """Five versions, the third with a checkpoint; their rows. `midway`: is called when the third is written."""
    with open_store(url) as store:
        created(store, SPECS)
        train(store, 3)
        write_checkpoint(home, store, dense_of(3), JOB, progress_of(3))
    midway()
    with open_store(url) as store:
        train(store, 2)
        return rows(store)


def goes_on_from_the_checkpoint(url: str, home: Path, expected: Rows) -> None:
    store, begun = resumed(url, home)
    with store:
        assert begun.progress == progress_of(3)
        assert begun.checkpoint is not None
        train(store, 2)
        assert rows(store) == expected
    with open_store(url) as again:  # nothing of the loss is left
        assert again.version() == 5
        assert rows(again) == expected


def rows_of(client: redis.Redis, table: bytes) -> bytes:
    """A partition of a table that has some rows."""
    return next(key for key in sorted(client.scan_iter("{elastable:*:rows")) if table in key and client.hlen(key) > 2)


def some_rows(client: redis.Redis) -> None:
    key = rows_of(client, b"dynamic")
    client.hdel(key, *[field for field in sorted(client.hkeys(key)) if len(field) == 8][:2])


LOSSES: dict[str, Callable[[redis.Redis], object]] = {
    "a partition": lambda client: client.delete(rows_of(client, b"fixed")),
    "some rows": some_rows,
    "a table and the registry": lambda client: client.delete("{elastable}:tier:tables"),
    "registry and state": lambda client: client.delete(
        "{elastable}:tier:tables", "{elastable}:tier:state", "{elastable}:log"
    ),
    "the log": lambda client: client.delete("{elastable}:log"),
    "all of it": lambda client: client.flushall(),
}


@pytest.fixture(scope="module", name="server")
def fixture_server(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(server_binary, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(name="client")
def fixture_client(server: Server) -> Iterator[redis.Redis]:
    """Of the server, which is empty."""
    with server.client() as client:
        client.flushall()
        yield client


@pytest.mark.parametrize("lost", LOSSES)
def test_a_job_goes_on_in_a_redis_that_lost_rows(
    server: Server, client: redis.Redis, lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{server.url}?partitions=4"
    client.hset("{elastable2:fixed:0}:rows", "another", "store")
    expected = trained_in(url, tmp_path / "kept")
    LOSSES[lost](client)
    if lost not in ("registry and state", "all of it"):  # these leave what looks like an empty store
        with pytest.raises(StoreBroken):
            open_store(url)
    goes_on_from_the_checkpoint(url, tmp_path / "kept", expected)
    if lost != "all of it":
        assert "the store cannot go on" in caplog.text
        assert f"the job goes on from {open_checkpoint(tmp_path / 'kept').address}, version 3" in caplog.text
        assert client.hgetall("{elastable2:fixed:0}:rows") == {b"another": b"store"}


def test_a_row_that_is_gone_is_missed_unless_the_log_has_it(server: Server, client: redis.Redis) -> None:
    url = f"{server.url}?partitions=1&flush=100000"
    with open_store(url) as store:
        created(store, (DYNAMIC,))
        commit(store, {"dynamic": [1, 2, 3, 4]})
        store.flush()  # type: ignore[attr-defined]
        commit(store, {"dynamic": [2, 5]})
        expected = rows(store)
        for one, lost in ((2, False), (3, True)):
            client.hdel("{elastable:dynamic:0}:rows", one.to_bytes(8, "little"))
            if lost:
                with pytest.raises(StoreBroken, match="table 'dynamic' has 4 rows and should have 5: rows are lost"):
                    open_store(url)
            else:
                with open_store(url) as again:
                    assert rows(again) == expected


def test_a_job_goes_on_where_a_node_of_a_cluster_was_emptied(server_binary: Path, tmp_path: Path) -> None:
    """The registry was there, and other nodes still hold partitions."""
    with running_cluster(server_binary, tmp_path / "nodes") as nodes:
        url = f"redis://{nodes[0].address}?partitions=8"
        expected = trained_in(url, tmp_path / "kept")
        with nodes[0].client() as client:
            slot = client.execute_command("CLUSTER KEYSLOT", "{elastable}")
        with nodes[slot * len(nodes) // 16_384].client() as client:
            assert client.exists("{elastable}:tier:tables")
            client.flushall()
        goes_on_from_the_checkpoint(url, tmp_path / "kept", expected)


def test_a_job_goes_on_where_a_partition_came_back_older(server: Server, client: redis.Redis, tmp_path: Path) -> None:
    """As after a failover of its node to a replica that lagged."""
    url = f"{server.url}?partitions=4"
    older = dict[bytes, bytes]()

    def dump() -> None:
        older.update({key: client.dump(key) for key in client.scan_iter("{elastable:fixed:*")})

    expected = trained_in(url, tmp_path / "kept", dump)
    for key, content in older.items():
        client.restore(key, 0, content, replace=True)
    message = r"has lost data of partition \d of table 'fixed'.*Go back to a checkpoint"
    with pytest.raises(StoreBroken, match=message):
        open_store(url)
    goes_on_from_the_checkpoint(url, tmp_path / "kept", expected)


def test_a_job_goes_on_where_redis_came_back_with_an_older_file(server_binary: Path, tmp_path: Path) -> None:
    """The append-only file of one server ends at one moment for rows and log: the store opens as it was then."""
    options = ("--appendonly", "yes", "--appendfsync", "always", "--aof-load-truncated", "yes")
    with running_server(server_binary, tmp_path / "redis", options) as server:
        url = f"{server.url}?partitions=4"
        (file,) = (tmp_path / "redis").glob("appendonlydir/*.incr.aof")
        sizes = list[int]()
        expected = trained_in(url, tmp_path / "kept", lambda: sizes.append(file.stat().st_size))
        server.kill()
        os.truncate(file, sizes[0] + (file.stat().st_size - sizes[0]) // 3)
        server.start()
        goes_on_from_the_checkpoint(url, tmp_path / "kept", expected)


def all_of_the_log(folder: Path) -> None:
    for file in (folder / "log").glob("*.log"):
        file.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "log": lambda folder: flip(max((folder / "log").glob("*.log"), key=lambda path: path.stat().st_size)),
    "rows": lambda folder: next((folder / "rows").glob("*.rows")).unlink(),
    "manifest": lambda folder: flip(folder / "rows" / "tables"),
    "all of the log": all_of_the_log,
    "the only log": lambda folder: flip(next(folder.glob("*.log"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_job_goes_on_in_files_that_are_damaged(damage: str, tmp_path: Path) -> None:
    url = f"{'memory?log=' if damage == 'the only log' else 'file://'}{tmp_path / 'store'}"
    expected = trained_in(url, tmp_path / "kept")
    DAMAGES[damage](tmp_path / "store")
    with pytest.raises(StoreBroken):
        open_store(url)
    goes_on_from_the_checkpoint(url, tmp_path / "kept", expected)


@pytest.mark.parametrize("whole", [False, True])
def test_only_the_shard_that_lost_is_emptied(server: Server, client: redis.Redis, tmp_path: Path, whole: bool) -> None:
    """A partition of it, or all that it held: the younger rows of the other shard are not left."""
    url = f"token:{server.url}?partitions=2,{server.url}?namespace=whole&partitions=2"
    expected = trained_in(url, tmp_path / "kept")
    with open_store(f"{server.url}?partitions=2") as shard:
        shard.recover()  # its last version is decided
    if whole:
        client.delete(*client.scan_iter("{elastable:*"), *client.scan_iter("{elastable}:*"))
    else:
        client.delete("{elastable:fixed:0}:rows")
        with pytest.raises(StoreBroken, match="has lost data of partition 0 of table 'fixed'"):
            open_store(url)
    goes_on_from_the_checkpoint(url, tmp_path / "kept", expected)


def test_a_live_owner_keeps_what_is_left(
    server: Server, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were lost while it was running; it gets the error when it next asks for them."""
    monkeypatch.setattr("elastable.jobs.store_watch._OWNER_LEAVES_S", 0.2)
    url = f"{server.url}?partitions=4"
    trained_in(url, tmp_path / "kept")
    with open_store(url) as holder:
        holder.reset_version(holder.version())
        LOSSES["a partition"](client)
        left = sorted(client.keys())
        with pytest.raises(BadInput, match=rf"the store is in use: \S+:{os.getpid()} "):
            resumed(url, tmp_path / "kept")
        assert sorted(client.keys()) == left


def test_nothing_is_deleted_without_a_fitting_checkpoint(server: Server, client: redis.Redis, tmp_path: Path) -> None:
    url = f"{server.url}?partitions=4"
    trained_in(url, tmp_path / "kept")
    LOSSES["a partition"](client)
    left = sorted(client.keys())
    with pytest.raises(StoreBroken):  # no checkpoint was asked for
        open_store(url)
    with pytest.raises(Unsupported, match="seed was 0 and is 8"):
        resumed(url, tmp_path / "kept", JobSpec(job="small", seed=8))
    flip(next((tmp_path / "kept").glob("**/*.safetensors")))
    with pytest.raises(CheckpointError):
        resumed(url, tmp_path / "kept")
    assert sorted(client.keys()) == left


def test_files_that_another_process_has_open_are_not_deleted(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    trained_in(url, tmp_path / "kept")
    with open_store(url) as running:
        with pytest.raises(StoreFailed, match="is open already"):
            resumed(url, tmp_path / "kept")
        assert running.version() == 5


@pytest.mark.timeout(900)
def test_a_killed_job_goes_on_where_rows_were_lost(server_binary: Path, trained: Trained, tmp_path: Path) -> None:
    with running_server(server_binary, tmp_path / "redis") as server:
        checkpoints = tmp_path / "checkpoints"
        url = f"{server.url}?flush=0.05&partitions=4"
        places: list[str | Path] = ["--store", url, "--run-dir", tmp_path / "runs", "--checkpoint-dir", checkpoints]
        job: list[str | Path] = ["train", CLICK_JOB, *OPTIONS, "--workers", "1", "--no-export", *places, "--resume"]
        hold = Hold(tmp_path / "hold", 28)
        with elastable(tmp_path, *job, "--checkpoint-every", "10", env=hold.environment) as train_:
            hold.wait(train_)
            train_.signal(signal.SIGKILL)
            train_.wait()
        with server.client() as client:
            client.delete(rows_of(client, b"users"))
        last = succeeded(*job)
        assert "has lost data of" in last.err
        assert "the job goes on from" in last.err
        assert "resuming at version 20" in last.out
        trained.require_same_numbers(checkpoints / "ckpt-0000000040")
