"""Increments hold what changed since the checkpoint before, and with what they build upon they are the whole."""

import errno
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.row_data import RowBlock, TableState, TableUpdate
from elastable.embedding_store.contract.spec import EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.dirty_rows import Changes, DirtyRows
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles, Part
from elastable.master.checkpoints.storage.checkpoint_locations import files_at, version_named
from tests.file_stores import file_store
from tests.master.checkpoints.jobs import (
    ADAGRAD,
    AGED,
    DYNAMIC,
    FIXED,
    SPECS,
    Rows,
    begun,
    commit,
    created,
    restored,
    rows,
    shards,
    train,
)
from tests.master.checkpoints.test_damage import sealed
from tests.plugins.seeds import examples


class Job:
    """A store and the checkpoints of it."""

    def __init__(
        self, place: str | Path | LocalFiles, store: EmbeddingStore, keep: int = 0, full_every: int = 4
    ) -> None:
        self.store = store
        self.series = CheckpointSeries(place, store, keep=keep, full_every=full_every)

    def commit(self, **ids: list[int]) -> None:
        self.series.committed(commit(self.store, ids))

    def train(self, versions: int, most: int = 60) -> None:
        for _ in range(versions):
            (updates,) = train(self.store, 1, most)
            self.series.committed(updates)

    def save(self) -> Checkpoint:
        return open_checkpoint(begun(self.series, self.store)())


def kinds(checkpoint: Checkpoint) -> list[str]:
    return [one.manifest.kind for one in checkpoint.chain()]


def test_every_few_checkpoints_one_is_full(tmp_path: Path) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        job = Job(tmp_path, store, full_every=3)
        job.commit(fixed=list(range(200)), dynamic=list(range(200)))
        reported = []
        for _ in range(7):
            job.train(2, most=500)
            found = job.save()
            reported.append(found.manifest.kind)
            assert restored(found) == rows(store)
        assert reported == ["full", "increment", "increment", "full", "increment", "increment", "full"]
        assert kinds(open_checkpoint(tmp_path / "ckpt-0000000013")) == ["increment", "increment", "full"]


def test_any_number_of_increments_may_build_upon_each_other(tmp_path: Path) -> None:
    with created(MemoryStore(), [FIXED]) as store:
        job = Job(tmp_path, store)
        for _ in range(2):
            job.train(1)
            last = job.save()
    at = tmp_path / last.name
    for version in range(last.version + 1, sys.getrecursionlimit() + 100):
        fields, of = json.loads((at / "manifest.json").read_text()), at
        at = tmp_path / f"ckpt-{version:010d}"
        at.mkdir()
        for file in fields["files"]:
            os.link(of / file, at / file)
        base = {"name": of.name, "version": fields["version"], "checksum": fields["checksum"]}
        sealed(at, {**fields, "version": version, "base": base})
    found = open_checkpoint(at)
    assert len(found.chain()) == found.version - last.version + len(last.chain())
    assert restored(found) == restored(last)


def test_an_increment_holds_what_changed_and_no_more(tmp_path: Path) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        job = Job(tmp_path, store)
        job.commit(fixed=list(range(100)), dynamic=list(range(-50, 50)))
        full = job.save()
        job.commit(fixed=[3, 7], dynamic=[-5, 1000])
        job.commit(fixed=[7, 499])
        entries = job.save().manifest.tables
        assert (entries["fixed"].written, entries["fixed"].rows) == (3, 101)
        assert (entries["dynamic"].written, entries["dynamic"].rows) == (2, 101)
        assert entries["fixed"].live is None
        assert (full.manifest.tables["fixed"].written, full.manifest.kind) == (100, "full")
        # A table of which half changed is written whole.
        job.commit(fixed=list(range(60)), dynamic=[1])
        entries = job.save().manifest.tables
        assert (entries["fixed"].whole, entries["dynamic"].whole) == (True, False)


def deleted(store: EmbeddingStore) -> None:
    store.delete("fixed", np.array([5, 6]))
    store.delete("dynamic", np.array([5, 6, 999]))


def made_again(store: EmbeddingStore) -> None:
    store.drop_table("dynamic")
    created(store, [DYNAMIC])


def made_anew(store: EmbeddingStore) -> None:
    store.drop_table("dynamic")
    created(store, [TableSpec("dynamic", 5, optimizer=ADAGRAD)])


@pytest.mark.parametrize(
    ("change", "whole", "live"),
    [(deleted, False, True), (made_again, True, False), (made_anew, True, False)],
)
def test_what_was_done_to_rows_and_tables_by_hand_is_in_it(
    tmp_path: Path, change: Callable[[EmbeddingStore], None], whole: bool, live: bool
) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        job = Job(tmp_path, store)
        job.commit(fixed=list(range(40)), dynamic=list(range(40)))
        job.save()
        change(store)
        job.commit(fixed=[1], dynamic=[6])
        found = job.save()
        dynamic = found.manifest.tables["dynamic"]
        assert (found.manifest.kind, dynamic.whole, dynamic.live is not None) == ("increment", whole, live)
        assert restored(found) == rows(store)


def test_rows_evicted_before_the_store_was_read_from_its_log_again_are_gone(tmp_path: Path) -> None:
    """As after a commit that could not be logged: its statistics begin anew, and yet they say that rows went."""
    spec = TableSpec("aged", 2, optimizer=ADAGRAD, eviction=EvictionSpec(max_age=3))
    with created(file_store(tmp_path / "store"), [spec]) as store:
        job = Job(tmp_path / "saved", store)
        job.commit(aged=list(range(9)))
        job.commit()
        job.commit(aged=list(range(9, 60)))
        job.save()
        job.commit()
        job.commit()
        assert store.table_statistics("aged").evicted == 9
        assert isinstance(store, MemoryStore)
        store.flush()
        job.commit(aged=[9])
        store.recover(5)
        job.commit(aged=[9])
        assert restored(job.save()) == rows(store)


def test_one_begun_before_another_failed_is_full(tmp_path: Path) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        job = Job(tmp_path, store)
        job.train(6, most=500)
        job.save()
        job.train(1)
        first = begun(job.series, gone := store.pin())
        job.train(1)
        second = begun(job.series, store)
        gone.close()
        with pytest.raises(Exception, match=r"released|gone"):
            first()
        found = open_checkpoint(second())
        assert found.manifest.kind == "full"
        assert restored(found) == rows(store)


def test_the_next_one_holds_what_is_in_one_that_was_written_and_could_not_be_read_again(tmp_path: Path) -> None:
    class Unreadable(LocalFiles):
        """Fails once a checkpoint has been written."""

        fails = unreadable = False

        def commit(self, draft: str, name: str, manifest: Sequence[Part]) -> None:
            super().commit(draft, name, manifest)
            self.unreadable = self.fails

        def read(self, path: str, most: int | None = None) -> UInt8:
            if self.unreadable:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, most)

    files = Unreadable(tmp_path)
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        job = Job(files, store)
        job.train(6, most=500)
        job.save()
        for files.fails in (True, False):
            job.train(1)
            if files.fails:
                with pytest.raises(CheckpointError, match="Input/output error"):
                    job.save()
            files.unreadable = False
        assert restored(job.save()) == rows(store)


@pytest.mark.parametrize("another", [False, True])
def test_where_its_base_is_incomplete_or_another_one_the_next_one_is_full(tmp_path: Path, another: bool) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        job = Job(tmp_path / "ours", store)
        job.train(6, most=500)
        base = job.save()
        if another:
            store.delete("fixed", np.arange(9))
            other = Job(tmp_path / "theirs", store).save()
            (tmp_path / "ours" / base.name).rename(tmp_path / "moved")
            Path(other.address).rename(base.address)
        else:
            (tmp_path / "ours" / base.name / "dense.safetensors").unlink()
        job.train(1)
        found = job.save()
        assert found.manifest.kind == "full"
        assert restored(found) == rows(store)


def test_an_increment_of_another_base_is_refused(tmp_path: Path) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        job = Job(tmp_path / "a", store)
        job.train(6, most=500)
        job.save()
        job.train(1)
        found = job.save()
        other = Job(tmp_path / "b", store)
        store.reset_version(6)
        other.save()
        (tmp_path / "a" / "ckpt-0000000006").rename(tmp_path / "moved")
        with pytest.raises(CheckpointError, match=r"builds upon a checkpoint that cannot be used.*ckpt-0000000006"):
            open_checkpoint(found.address)
        (tmp_path / "b" / "ckpt-0000000006").rename(tmp_path / "a" / "ckpt-0000000006")
        with pytest.raises(CheckpointError, match="builds upon another checkpoint than the one that is at"):
            open_checkpoint(found.address)


@pytest.mark.parametrize(("full_every", "keep"), [(0, 3), (2, -1)])
def test_settings_that_cannot_be_are_refused(tmp_path: Path, full_every: int, keep: int) -> None:
    with MemoryStore() as store, pytest.raises(BadInput, match="full_every must be at least 1"):
        CheckpointSeries(tmp_path, store, keep=keep, full_every=full_every)


IDS = st.lists(st.integers(0, 30), max_size=6)
STORES: list[Callable[[], EmbeddingStore]] = [
    lambda: MemoryStore(threads=1),
    lambda: shards(2, "token"),
    lambda: shards(2, "encoding"),
]


class SeriesMachine(RuleBasedStateMachine):
    """Commits, deletions, evictions, checkpoints that succeed or fail, and restores, against dictionaries of rows."""

    @initialize(full_every=st.integers(1, 4), keep=st.integers(0, 3), kind=st.integers(0, 2))
    def begin(self, full_every: int, keep: int, kind: int) -> None:
        self.place, self.full_every, self.keep = f"memory://{uuid.uuid4().hex}/c", full_every, keep
        self.store = created(STORES[kind]())
        self.series = CheckpointSeries(self.place, self.store, keep=keep, full_every=full_every)
        self.saved: dict[int, Rows] = {}
        self.writes: list[Callable[[], str]] = []
        # Enough rows for increments to be worth their name.
        self.change({spec.name: list(range(100, 130)) for spec in SPECS})

    def change(self, ids: dict[str, list[int]], frozen: tuple[str, ...] = ()) -> None:
        updates = commit(self.store, {name: some for name, some in ids.items() if name not in frozen}, frozen)
        self.series.committed(updates, frozen)

    @rule(
        ids=st.fixed_dictionaries({}, optional={spec.name: IDS for spec in SPECS}),
        frozen=st.sampled_from([(), (), (), ("aged",), ("aged", "fixed")]),
    )
    def commit(self, ids: dict[str, list[int]], frozen: tuple[str, ...]) -> None:
        self.change(ids, frozen)

    @rule(table=st.sampled_from([spec.name for spec in SPECS]), ids=IDS)
    def delete(self, table: str, ids: list[int]) -> None:
        self.store.delete(table, np.array(ids, np.int64))

    @rule(table=st.sampled_from(["dynamic", "aged"]), one=st.integers(0, 30))
    def put(self, table: str, one: int) -> None:
        row: Float32 = np.full((1, 2), one, np.float32)
        self.store.put(table, [RowBlock(np.array([one]), row, row)])

    @rule(table=st.sampled_from([spec.name for spec in SPECS]))
    def clear(self, table: str) -> None:
        self.store.clear(table)

    @rule(fails=st.booleans())
    def checkpoint(self, fails: bool) -> None:
        version = self.store.version()
        write = begun(self.series, self.store, version + fails)
        if fails:
            with pytest.raises(BadInput, match="cannot be written of rows"):
                write()
            return
        write()
        self.saved[version] = rows(self.store)
        self.newest = self.standing()
        self.look()

    def standing(self) -> tuple[Rows, list[TableState]]:
        """All that decides how a store goes on."""
        return rows(self.store), [self.store.table_state(spec.name) for spec in SPECS]

    def look(self) -> None:
        """All checkpoints that are there are whole and right, and the newest of them are there."""
        files = files_at(self.place)
        names = sorted(files.names(), key=lambda name: version_named(name) or (-1, 0))  # -10 is after -9
        found = {open_checkpoint(files.at(name)).version: files.at(name) for name in names}
        newest = sorted(self.saved)[-self.keep :]
        assert set(newest) <= set(found) <= set(self.saved)
        for version, address in found.items():
            assert restored(open_checkpoint(address)) == self.saved[version]

    @precondition(lambda self: self.saved)
    @rule(kind=st.integers(0, 2), builds=st.booleans())
    def resume(self, kind: int, builds: bool) -> None:
        newest = open_checkpoint(self.place)
        again = STORES[kind]()
        restore_tables(newest, again)
        assert rows(again) == self.saved[newest.version]
        if newest.version == self.store.version() and self.standing() == self.newest:
            # Both go on alike, whoever is admitted or evicted.
            for version in range(4):
                ids = {spec.name: [version, 101 + version] for spec in SPECS}
                commit(self.store, ids)
                commit(again, ids)
            assert rows(again) == rows(self.store)
            again.close()
            again = STORES[kind]()
            restore_tables(newest, again)
        self.store.close()
        self.store = again
        self.series = CheckpointSeries(
            self.place, again, keep=self.keep, full_every=self.full_every, resumed=newest if builds else None
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            memory = fsspec.filesystem("memory")
            if memory.exists(self.place):
                memory.rm(self.place, recursive=True)


TestSeriesMachine = SeriesMachine.TestCase
TestSeriesMachine.settings = settings(max_examples=examples(40), stateful_step_count=14, deadline=None)


def test_a_table_that_is_frozen_between_checkpoints_does_not_age_meanwhile(tmp_path: Path) -> None:
    with created(MemoryStore(), [AGED, DYNAMIC]) as store:
        job = Job(tmp_path, store)
        job.commit(aged=list(range(40)), dynamic=[1])
        job.commit(aged=[1])
        row = np.ones((1, 2), np.float32)
        store.put("aged", [RowBlock(np.array([77]), row, row)])
        job.save()
        for _ in range(5):  # version 3 and 6 would count anew, and give the row that was put its version
            job.series.committed(commit(store, {"dynamic": [2]}, ("aged",)), ("aged",))
        frozen = job.save()
        job.commit(dynamic=[3])
        trained = job.save()
        assert (frozen.manifest.kind, trained.manifest.kind) == ("increment", "increment")
        expected = rows(store)
        for ids in ([1, 5], [77], [2]):
            commit(store, {"aged": ids})
        for checkpoint in (frozen, trained):
            with MemoryStore() as other:
                restore_tables(checkpoint, other)
                if checkpoint is frozen:
                    commit(other, {"dynamic": [3]})
                assert rows(other) == expected
                for ids in ([1, 5], [77], [2]):
                    commit(other, {"aged": ids})
                assert rows(other) == rows(store)


def test_increments_of_tables_whose_rows_follow_every_step_restore_the_version_that_they_are_of(tmp_path: Path) -> None:
    """They are whole each time, as every row changes with every step."""
    adamw = OptimizerSpec.of("adamw", lazy=False, learning_rate=0.01, weight_decay=0.1)
    ids = {"t": np.arange(20)}
    with created(MemoryStore(), [TableSpec("t", 4, 20, optimizer=adamw)]) as store:
        job = Job(tmp_path, store)
        for _ in range(3):
            job.train(7, most=15)
            pin = store.pin()
            finish = begun(job.series, pin)
            expected = store.lookup(ids)["t"]
            job.train(1, most=15)  # training goes on while it is written
            checkpoint = open_checkpoint(finish())
            pin.close()
            for other in (MemoryStore(), shards(2, "encoding")):
                with other:
                    restore_tables(checkpoint, other)
                    assert np.array_equal(other.lookup(ids)["t"], expected)
                    train(other, 1, most=15)
                    assert np.allclose(other.lookup(ids)["t"], store.lookup(ids)["t"], rtol=1e-6, atol=1e-7)


def updates(**ids: list[int]) -> dict[str, TableUpdate]:
    return {
        table: TableUpdate(np.array(some, np.int64), np.ones((len(some), 1), np.float32)) for table, some in ids.items()
    }


def ids_of(changes: Changes, table: str, most: int = 7) -> list[int] | None:
    blocks = changes.ids(table, most)
    if blocks is None:
        return None
    found: list[Int64] = list(blocks)
    assert all(0 < len(block) <= most for block in found)
    held = [int(one) for block in found for one in block]
    assert len(held) == changes.described(table, 99).changed == len(set(held))
    return sorted(held)


@given(
    steps=st.lists(st.tuples(st.lists(st.integers(0, 499), unique=True, max_size=40), st.booleans()), max_size=8),
    most=st.integers(1, 90),
)
def test_every_id_once_also_of_checkpoints_that_failed(steps: list[tuple[list[int], bool]], most: int) -> None:
    """What several failed ones had taken is taken again; one that was written is forgotten while ids are added."""
    with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
        dirty, base, expected = DirtyRows(store, b"0"), b"0", set[int]()
        for number, (batch, fails) in enumerate([*steps, ([], False), ([], False)], 1):
            forgetting = threading.Thread(target=dirty.forget, args=(base if number % 2 else b"another",))
            forgetting.start()
            dirty.add(updates(fixed=batch, dynamic=[-one for one in batch]))
            forgetting.join(60)
            expected |= set(batch)
            taken = dirty.take(mark := b"%d" % number, base)
            assert ids_of(taken, "fixed", most) == sorted(expected)
            assert ids_of(taken, "dynamic", most) == sorted(-one for one in expected)
            if not fails:
                base = mark
                expected.clear()
        assert ids_of(dirty.take(b"asked", b"unknown"), "fixed") is None, "any row may have changed since another one"
        assert ids_of(dirty.take(b"again", b"asked"), "fixed") == []


def test_the_table_that_takes_the_most_memory_is_given_up() -> None:
    small = TableSpec("small", 1, 64)
    with created(MemoryStore(threads=1), [DYNAMIC, small]) as store:
        dirty = DirtyRows(store, b"0", most_bytes=200_000)
        dirty.add(updates(dynamic=list(range(20_000)), small=[5]))
        assert dirty.bytes < 200_000
        taken = dirty.take(b"1", b"0")
        assert ids_of(taken, "dynamic") is None
        assert ids_of(taken, "small") == [5]
        assert ids_of(dirty.take(b"2", b"0"), "dynamic") is None
        dirty.add(updates(dynamic=[1]))
        assert ids_of(dirty.take(b"3", b"2"), "dynamic") == [1]
