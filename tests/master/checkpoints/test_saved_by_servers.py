"""Store servers write checkpoints together: full ones and increments, whole or not at all, and only where they may."""

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, CheckpointError, ElastableError
from elastable.embedding_store.shards.server_contract import (
    PushedCommit,
    RowPush,
    RowSave,
    RowSums,
    Slices,
    SumTerm,
    TableSave,
)
from elastable.embedding_store.shards.version_sums import sum_pushes
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles
from elastable.master.checkpoints.storage.checkpoint_locations import files_at
from elastable.master.checkpoints.writing import write_blocks
from tests.embedding_store.shards.served_shards import begin_job, served, stopped_with
from tests.master.checkpoints.jobs import SPECS, Rows, begun, commit, created, restored, rows
from tests.waiting import until

DEADLINE_S = 120.0
WRITE = "elastable.master.checkpoints.row_saver.write_blocks"


class Job:
    """A job on store servers, and the same one in the memory of this process."""

    def __init__(self, store: StoreServers, place: str | Path | LocalFiles, full_every: int = 4) -> None:
        self.store, self.alone = store, created(MemoryStore(1))
        created(store)
        begin_job(store, "small")
        self.series = CheckpointSeries(place, store, keep=0, full_every=full_every)

    def train(self, ids: Sequence[int], frozen: tuple[str, ...] = ()) -> None:
        """One version in which all tables but the frozen ones have gradients of these ids."""
        version = self.store.version()
        random = np.random.default_rng(version)
        some = np.array(ids, np.int64)
        slices = {
            spec.name: Slices(some, random.standard_normal((len(some), spec.dim)).astype(np.float32))
            for spec in SPECS
            if spec.name not in frozen
        }
        push = RowPush("small", version, 0, (slices,))
        sums = RowSums(version, (SumTerm(0, 0, 1.0),), frozen=frozen)
        self.store.push_rows(push)
        self.store.commit_pushed(PushedCommit(sums, version, {}, time=1e9))
        self.alone.commit(Commit(version + 1, sum_pushes(sums, {0: push.parts}), version, {}, frozen=frozen, time=1e9))
        self.series.committed({}, frozen)

    def begin(self) -> Callable[[], str]:
        return begun(self.series, self.store.pin(self.store.version()))


def restored_at(servers: int, checkpoint: Checkpoint) -> Rows:
    """What so many servers hold that are filled from a checkpoint; 0: a store in this process."""
    if not servers:
        return restored(checkpoint)
    with served(servers) as (_, sharded):
        restore_tables(checkpoint, sharded)
        assert sharded.version() == checkpoint.version
        return rows(sharded)


@pytest.mark.parametrize(("servers", "into", "kind"), [(1, 2, "folder"), (2, 3, "url"), (3, 0, "folder")])
def test_checkpoints_restore_to_any_number_of_servers(tmp_path: Path, servers: int, into: int, kind: str) -> None:
    place = tmp_path / "saved" if kind == "folder" else f"memory://saved/{uuid.uuid4().hex}"
    with served(servers) as (_, store):
        job, expected = Job(store, place, full_every=5), {}
        for few, frozen in (((0, 300), ()), ((0, 140), ()), ((0, 60), ()), ((7, 14), ()), ((7, 14), ("aged",))):
            for _ in range(2):  # so that rows of a table go by age
                job.train(range(*few), frozen)
            expected[job.begin()().rpartition("/")[2]] = rows(job.alone)
            assert rows(store) == rows(job.alone)
    kinds, shrunk = [], False
    for name, there in expected.items():
        saved = open_checkpoint(f"{place}/{name}")
        saved.verify()
        kinds.append(saved.manifest.kind)
        shrunk |= saved.manifest.tables["aged"].live is not None
        assert sum(len(block.ids) for table in saved.manifest.tables for block in saved.rows(table)) == len(there)
        assert restored_at(into, saved) == there
    assert kinds == ["full", *["increment"] * 4]
    assert shrunk, "no increment had to list the rows that stay"
    assert saved.manifest.tables["fixed"].written == 7


def test_rows_that_are_split_by_column_are_written_whole_by_the_master(tmp_path: Path) -> None:
    with served(2, strategy="encoding") as (_, store):
        job = Job(store, tmp_path)
        for _ in range(2):
            job.train(range(30))
            job.begin()()
        expected = rows(job.alone)
        assert rows(store) == expected
    saved = open_checkpoint(tmp_path)
    assert {entry.whole for entry in saved.manifest.tables.values()} == {True}
    for servers in (0, 3):
        assert restored_at(servers, saved) == expected


def test_what_a_master_with_its_own_rows_wrote_goes_on_over_servers_as_increments(tmp_path: Path) -> None:
    alone = created(MemoryStore(1))
    commit(alone, {"fixed": list(range(200))})
    series = CheckpointSeries(tmp_path, alone, keep=0)
    begun(series, alone)()
    saved = open_checkpoint(tmp_path)
    with served(2) as (_, store):
        restore_tables(saved, store)
        begin_job(store, "small")
        again = CheckpointSeries(tmp_path, store, keep=0, full_every=4, resumed=saved)
        slices = Slices(np.array([3, 5]), np.ones((2, 3), np.float32))
        store.push_rows(RowPush("small", 1, 0, ({"fixed": slices},)))
        store.commit_pushed(PushedCommit(RowSums(1, (SumTerm(0, 0, 1.0),)), 1, {}))
        again.committed({})
        begun(again, store)()
        newest = open_checkpoint(tmp_path)
        assert (newest.manifest.kind, newest.manifest.tables["fixed"].written) == ("increment", 2)
        assert restored_at(3, newest) == rows(store)


def held_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Servers write from now on once the second event is set; the first one says that one is about to."""
    began, go_on = threading.Event(), threading.Event()
    write = write_blocks

    def held(*place):  # type: ignore[no-untyped-def]
        began.set()
        assert go_on.wait(DEADLINE_S)
        return write(*place)

    monkeypatch.setattr(WRITE, held)
    return began, go_on


def test_training_goes_on_while_servers_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(2) as (_, store):
        job = Job(store, tmp_path)
        job.train(range(300))
        expected = rows(job.alone)
        began, go_on = held_writes(monkeypatch)
        thread = threading.Thread(target=job.begin())
        thread.start()
        try:
            assert began.wait(DEADLINE_S)
            for _ in range(3):
                job.train(range(100))
        finally:
            go_on.set()
            thread.join(DEADLINE_S)
        monkeypatch.undo()
        assert restored(open_checkpoint(tmp_path)) == expected
        job.begin()()
        newest = open_checkpoint(tmp_path)
        assert (newest.manifest.kind, newest.manifest.tables["dynamic"].written) == ("increment", 100)
        assert restored(newest) == rows(job.alone)


def test_changes_of_a_checkpoint_that_failed_are_in_the_next_one(tmp_path: Path) -> None:
    with served(2, tmp_path / "logs") as (servers, store):
        job = Job(store, tmp_path / "saved")
        job.train(range(300))
        job.begin()()
        job.train([1, 2])
        write = job.begin()
        stopped_with(servers, 1)  # with its pin, and with what it knew of changes
        with pytest.raises(ElastableError):
            write()
        assert sorted(files_at(tmp_path / "saved").names()) == ["ckpt-0000000001"]
        job.train([3])
        job.begin()()
        newest = open_checkpoint(tmp_path / "saved")
        assert newest.manifest.tables["fixed"].whole, "nobody knows what changed on the server that was started again"
        assert restored(newest) == rows(job.alone)
        job.train([4])
        job.begin()()
        newest = open_checkpoint(tmp_path / "saved")
        assert (newest.manifest.kind, newest.manifest.tables["fixed"].written) == ("increment", 1)
        assert restored(newest) == rows(job.alone)


def test_changes_of_two_that_failed_the_later_begun_before_the_first_did_are_in_the_next_one(tmp_path: Path) -> None:
    with served(2) as (_, store):
        job = Job(store, tmp_path)
        job.train(range(300))
        job.begin()()
        failing = []
        for row in (1, 2):
            job.train([row])
            pin = store.pin(store.version())
            failing.append(begun(job.series, pin))
            pin.close()
        for write in failing:
            with pytest.raises(ElastableError):
                write()
        job.train([3])
        job.begin()()
        assert restored(open_checkpoint(tmp_path)) == rows(job.alone)


def test_a_folder_that_a_server_does_not_share_is_named_before_training(tmp_path: Path) -> None:
    class Elsewhere(LocalFiles):
        """The disk of another host has this path, too."""

        @property
        def place(self) -> str:
            return str(tmp_path / "theirs")

    with served(2) as (_, store):
        job = Job(store, Elsewhere(tmp_path / "ours"))
        with pytest.raises(CheckpointError, match=r"server 127.0.0.1:\d+: it cannot write to .*/theirs: .*share"):
            job.series.require_reached(0)
        assert files_at(tmp_path / "ours").names() == []
        CheckpointSeries(tmp_path / "shared", store).require_reached(0)
        assert files_at(tmp_path / "shared").names() == []


SAVE = RowSave(
    bytes(16), "/tmp", ".writing-" + 32 * "a", "dense.safetensors", 8, (TableSave("fixed", "table-0000-s000"),)
)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (replace(SAVE, draft="../../etc"), "no draft of a checkpoint"),
        (replace(SAVE, draft=".writing-" + 30 * "a" + "/x"), "no draft of a checkpoint"),
        (replace(SAVE, place="relative/folder"), "a path from the root or a URL"),
        (replace(SAVE, place="simplecache::http://host/x"), "one URL"),
        (replace(SAVE, place="/" + 5_000 * "a"), "at most 4,096"),
        (replace(SAVE, known="../secret.safetensors"), "known file"),
        (replace(SAVE, tables=(TableSave("fixed", "../../x-s000"),)), "named table-0000-s000"),
        (replace(SAVE, tables=(TableSave("other", "table-0000-s000"),)), "is not here"),
        (replace(SAVE, save=b"short"), "16 bytes"),
    ],
)
def test_what_would_lie_outside_of_the_draft_is_refused(save: RowSave, message: str) -> None:
    with served(1) as (servers, store):
        created(store)
        with pytest.raises(BadInput, match=message):
            servers[0].shard.save_rows(save, servers[0].store, 0.0)


def test_a_folder_without_the_file_of_the_master_is_not_written_to(tmp_path: Path) -> None:
    draft = tmp_path / (".writing-" + 32 * "a")
    draft.mkdir()
    with served(1) as (servers, store):
        created(store)
        save = replace(SAVE, place=str(tmp_path))
        with pytest.raises(CheckpointError, match="not the folder that the master writes to"):
            servers[0].shard.save_rows(save, servers[0].store, DEADLINE_S)
    assert list(draft.iterdir()) == []


def test_a_new_owner_ends_what_the_one_before_had_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(1) as (servers, store):
        job = Job(store, tmp_path)
        job.train(range(300))
        began, go_on = held_writes(monkeypatch)
        failed: list[ElastableError] = []

        def writing() -> None:
            try:
                job.begin()()
            except ElastableError as error:
                failed.append(error)

        thread = threading.Thread(target=writing)
        thread.start()
        assert began.wait(DEADLINE_S)
        with StoreServers([ShardClient(servers[0].address, DEADLINE_S)]) as other:
            claiming = threading.Thread(target=other.begin_job, args=("another", False, bytes(32)))
            saver: Any = servers[0].shard._saver
            attempt = saver._attempt
            claiming.start()
            until(attempt._stopped.is_set, DEADLINE_S)
            go_on.set()
            claiming.join(DEADLINE_S)
            thread.join(DEADLINE_S)
        assert len(failed) == 1
        assert files_at(tmp_path).names() == []
