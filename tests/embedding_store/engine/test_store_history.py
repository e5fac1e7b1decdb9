"""A memory store with a history is killed at any moment, and comes back as if nothing had happened."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastable.embedding_store import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import staged_commit, store_history
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreBroken, StoreFailed, Unavailable
from elastable.embedding_store.log import base_file
from tests.contracts.store_pins import whole
from tests.contracts.store_samples import create_tables
from tests.file_stores import quick_folder

NORMAL = InitializerSpec("normal", 0, 1)
SPECS = {
    spec.name: spec
    for spec in (
        TableSpec("fixed", 3, 14, initializer=NORMAL, optimizer=OptimizerSpec.of("adam", learning_rate=0.1), seed=1),
        TableSpec("dynamic", 2, initializer=NORMAL, optimizer=OptimizerSpec.of("adagrad")),
        TableSpec("half", 2, None, "bfloat16", NORMAL, 4, OptimizerSpec.of("sgd")),
        TableSpec("byte", 4, None, "int8", NORMAL, 4, OptimizerSpec.of("adagrad")),
        TableSpec("rare", 2, admission=AdmissionSpec(2, 64), eviction=EvictionSpec(max_age=2, every=2)),
        TableSpec("often", 2, optimizer=OptimizerSpec.of("adam"), eviction=EvictionSpec(min_frequency=2, every=3)),
        TableSpec("every", 2, optimizer=OptimizerSpec.of("adam", lazy=False), initializer=NORMAL),
        TableSpec("decayed", 2, 14, optimizer=OptimizerSpec.of("adamw", weight_decay=0.1, lazy=False), seed=3),
        TableSpec("admitted", 2, admission=AdmissionSpec(2, 64)),
        TableSpec("few", 1, eviction=EvictionSpec(max_rows=5)),
        TableSpec("timed", 2, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(ttl=2.0, every=2)),
    )
}
NAMES = sorted(SPECS)
TRAINED = [name for name in NAMES if name != "byte"]  # int8 rows are put, and read
MOST = 13
IDS = st.lists(st.integers(0, MOST), min_size=1, max_size=8, unique=True)
HISTORIES = settings(max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))


def everything(store: EmbeddingStore) -> dict[str, object]:
    names = sorted(store.specs())
    read = [store.lookup({name: np.arange(MOST + 1)})[name].tobytes() for name in names]
    return {"version": store.version(), "read": read, **whole(store, names)}


def opened(folder: Path, log_bytes: int = 1 << 30, fsync: str = "interval") -> MemoryStore:
    with ExitStack() as stack:
        history = stack.enter_context(StoreHistory(folder, log_bytes=log_bytes, fsync=fsync))
        store = stack.enter_context(MemoryStore(1, direct_bytes=100))
        store.keep_history(history)
        stack.pop_all()
    return store


def base_written(store: MemoryStore) -> None:
    assert isinstance(store._history, StoreHistory)
    if store._history._writing is not None:
        store._history._writing.join(60)


def log_size(folder: Path) -> int:
    size = 0
    for path in folder.glob("*.log"):
        with suppress(FileNotFoundError):  # trimmed meanwhile
            size += path.stat().st_size
    return size


def step(store: EmbeddingStore, ids: list[int], seed: int, names: list[str], ends_replay_epoch: bool = False) -> None:
    version, random = store.version(), np.random.default_rng(seed)
    updates = {
        name: TableUpdate(np.array(ids), random.normal(size=(len(ids), SPECS[name].dim)).astype(np.float32))
        for name in names
    }
    frozen = ("few",) if "few" in set(store.specs()).difference(updates) and seed % 2 else ()
    record = None if seed % 3 == 0 else random.bytes(seed % 5)
    rates = dict.fromkeys(names, 0.01 * (1 + seed % 4))
    now = 1000.0 + version + 0.25 * (seed % 7)  # some of them are before the last
    store.commit(Commit(version + 1, updates, version, rates, record, ends_replay_epoch, frozen, now))


class TwoStores(RuleBasedStateMachine):
    """Two stores that see the same calls; a subclass makes them, and disturbs `kept` alone.

    What lies in files lies in `folder / str(lives)`.
    """

    kept: MemoryStore
    plain: MemoryStore

    def __init__(self) -> None:
        super().__init__()
        self.folder = quick_folder()
        self.lives = 0

    def begun(self, kept: MemoryStore) -> None:
        self.kept, self.plain = kept, MemoryStore(1, direct_bytes=100)
        for store in (self.kept, self.plain):
            create_tables(store, *SPECS.values())

    def copied(self) -> Path:
        self.lives += 1
        return Path(shutil.copytree(self.folder / str(self.lives - 1), self.folder / str(self.lives)))

    def opened_again(self, opened: Callable[[], MemoryStore], record: bytes | None) -> None:
        """The kept store's next life begins: it reads no clock, though rows go with time."""
        with patch.object(staged_commit, "time", None):
            self.kept = opened()
        assert self.kept.record() == record
        shutil.rmtree(self.folder / str(self.lives - 1))

    def settle(self) -> None:
        """Waits for what goes on behind."""

    @invariant()
    def both_are_the_same(self) -> None:
        if hasattr(self, "kept"):
            self.settle()
            assert everything(self.kept) == everything(self.plain)

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            self.kept.close()
            self.plain.close()
        shutil.rmtree(self.folder)

    def table(self, name: str) -> str:
        """The table that a rule takes where it has drawn this name."""
        return name

    def tables(self, names: list[str]) -> list[str]:
        return names

    @rule(
        ids=IDS,
        seed=st.integers(0, 1 << 20),
        names=st.lists(st.sampled_from(TRAINED), max_size=4, unique=True),
        ends_replay_epoch=st.booleans(),
    )
    def commit(self, ids: list[int], seed: int, names: list[str], ends_replay_epoch: bool) -> None:
        for store in (self.kept, self.plain):
            step(store, ids, seed, self.tables(names), ends_replay_epoch=ends_replay_epoch)

    @rule(ids=IDS, name=st.sampled_from(NAMES), seed=st.integers(0, 99), touched=st.booleans())
    def put(self, ids: list[int], name: str, seed: int, touched: bool) -> None:
        name = self.table(name)
        random, spec = np.random.default_rng(seed), SPECS[name]
        slots = self.plain.read_rows(name, np.array(ids)).slots.shape[1]
        touches = random.integers(0, 3, (len(ids), 2)) if touched and spec.eviction else None
        weights = random.normal(size=(len(ids), spec.dim)).astype(np.float32)
        block = RowBlock(np.array(ids), weights, random.random((len(ids), slots)).astype(np.float32), touches)
        for store in (self.kept, self.plain):
            store.put(name, [block])

    @rule(ids=IDS, name=st.sampled_from(NAMES))
    def delete(self, ids: list[int], name: str) -> None:
        name = self.table(name)
        assert self.kept.delete(name, np.array(ids)) == self.plain.delete(name, np.array(ids))

    @rule(name=st.sampled_from(NAMES), again=st.booleans())
    def clear_or_drop(self, name: str, again: bool) -> None:
        name = self.table(name)
        for store in (self.kept, self.plain):
            if again:
                store.drop_table(name)
                store.create_table(SPECS[name])
            else:
                store.clear(name)

    @rule(version=st.integers(0, 30))
    def reset(self, version: int) -> None:
        for store in (self.kept, self.plain):
            store.reset_version(version)


class AnyHistory(TwoStores):
    """One store with a history, and one without; both see the same calls, and only one of them is killed."""

    @initialize(log_bytes=st.sampled_from([200, 4_000, 1 << 30]))
    def begin(self, log_bytes: int) -> None:
        self.log_bytes = log_bytes
        self.begun(opened(self.folder / "0", log_bytes))

    @rule(torn=st.binary(max_size=60))
    def kill(self, torn: bytes) -> None:
        """What lies in files now is all that is left; the last write may have been torn."""
        record, folder = self.kept.record(), self.copied()
        newest = sorted(folder.glob("*.log"))[-1]
        with newest.open("ab") as file:
            file.write(torn)
        self.kept.close()
        self.opened_again(lambda: opened(folder, self.log_bytes), record)

    def settle(self) -> None:
        base_written(self.kept)  # so that what happens does not depend on threads


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = HISTORIES


def test_the_version_before_can_be_gone_back_to(tmp_path: Path) -> None:
    with create_tables(opened(tmp_path), *SPECS.values()) as store:
        for seed in range(6):
            before, record = everything(store), store.record()
            step(store, [1, 2, 5 + seed], seed, TRAINED)
        pin = store.pin()
        assert store.recover() == 0
        pin.renew()
        assert store.recover(5) == 3 * len(TRAINED) - 3, "two tables have not admitted id 10, and one has evicted it"
        assert everything(store) == before
        assert store.record() == record
        with pytest.raises(StaleVersion, match="the pin of version 6 is gone: the store went back to version 5"):
            pin.renew()
        with pytest.raises(StaleVersion):
            store.recover(3)
        step(store, [7], 9, TRAINED)
        after = everything(store)
    with opened(tmp_path) as store:
        assert everything(store) == after


def test_a_base_replaces_the_log_before_it(tmp_path: Path) -> None:
    sizes = []
    with create_tables(opened(tmp_path, log_bytes=20_000), SPECS["dynamic"]) as store:
        for seed in range(600):
            step(store, list(range(MOST)), seed, ["dynamic"])
            base_written(store)  # the log grows meanwhile, as far as a busy machine lets it
            sizes.append(log_size(tmp_path))
        before = everything(store)
    assert len(list(tmp_path.glob("*.base"))) == 1
    assert max(sizes) < 40_000
    with opened(tmp_path) as store:
        assert everything(store) == before


def test_a_pin_has_what_changed_by_hand_since_its_base_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, real = threading.Event(), base_file.write_base

    def write(*base: Any) -> Any:
        held.wait(60)
        return real(*base)

    monkeypatch.setattr(store_history, "write_base", write)
    with create_tables(opened(tmp_path, log_bytes=1), SPECS["dynamic"]) as store:
        step(store, [1, 2, 3], 1, ["dynamic"])
        assert [pin.version for pin in store.pins()] == [1]
        threading.Timer(0.1, held.set).start()
        with store.pin() as pin:  # nothing has changed: it shares what the base keeps
            assert len(store.pins()) == 2
            assert pin.row_count("dynamic") == 3
        store.delete("dynamic", np.array([1]))
        with store.pin() as pin:
            assert [block.ids.tolist() for block in pin.scan("dynamic")] == [[2, 3]]
            step(store, [2, 9], 2, ["dynamic"])
            assert sorted(one for block in pin.scan("dynamic") for one in block.ids.tolist()) == [2, 3]
        before = everything(store)
    with opened(tmp_path) as store:
        assert everything(store) == before


def test_killed_between_a_new_base_and_trimming(tmp_path: Path) -> None:
    kept, copied = tmp_path / "kept", tmp_path / "copied"
    with create_tables(opened(kept), SPECS["dynamic"]) as store:
        for seed in range(60):
            step(store, [seed, 1], seed, ["dynamic"])
    shutil.copytree(kept, copied)
    with opened(kept, log_bytes=100) as store:
        step(store, [9], 9, ["dynamic"])
        base_written(store)
        before = everything(store)
    for path in kept.iterdir():  # the newest segments and the base, with all segments before
        shutil.copy(path, copied / path.name)
    (copied / "00000000000000000001.base.new").write_bytes(b"begun by a process that died")
    assert len(list(copied.glob("*.base"))) == 1
    with opened(copied) as store:
        assert everything(store) == before
    assert not list(copied.glob("*.new"))


def test_the_log_is_on_the_disk_before_a_base_of_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    plain_sync, plain_replace = os.fdatasync, Path.replace

    def sync(fd: int) -> None:
        calls.append("log")
        plain_sync(fd)

    def replace(path: Path, target: Path) -> Path:
        calls.append("base")
        return plain_replace(path, target)

    with create_tables(opened(tmp_path, log_bytes=1 << 30, fsync="never"), SPECS["dynamic"]) as store:
        monkeypatch.setattr(os, "fdatasync", sync)
        monkeypatch.setattr(Path, "replace", replace)
        assert isinstance(store._history, StoreHistory)
        store._history._log_bytes = 1
        step(store, [1], 0, ["dynamic"])
        base_written(store)
    assert calls[:2] == ["log", "base"]


def test_only_an_empty_store_is_brought_to_the_version_of_a_history(tmp_path: Path) -> None:
    store = create_tables(MemoryStore(1), SPECS["dynamic"])
    with store, StoreHistory(tmp_path) as history, pytest.raises(BadInput, match="only an empty memory store"):
        store.keep_history(history)


def test_a_commit_that_cannot_be_written_is_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int, pieces: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with create_tables(opened(tmp_path / "s"), SPECS["dynamic"]) as store:
        step(store, [1, 2], 0, ["dynamic"])
        before = everything(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fails)
            with pytest.raises(StoreFailed, match="cannot be written: No space left on device"):
                step(store, [1, 3], 1, ["dynamic"])
        # Rows in memory are of a version that is nowhere written: nobody reads them.
        with pytest.raises(Unavailable, match="version 2 could not be logged yet"):
            store.lookup({"dynamic": np.arange(3)})
        killed = tmp_path / "killed"
        shutil.copytree(tmp_path / "s", killed)
        step(store, [1, 4], 1, ["dynamic"])  # another commit than the one that failed
        after = everything(store)
    with opened(killed) as store:
        assert everything(store) == before
        step(store, [1, 4], 1, ["dynamic"])
        assert everything(store) == after


def test_a_base_that_is_corrupt_or_gone_is_refused(tmp_path: Path) -> None:
    with create_tables(opened(tmp_path, log_bytes=100), SPECS["dynamic"]) as store:
        for seed in range(60):
            step(store, [seed], seed, ["dynamic"])
        base_written(store)
    (base,) = tmp_path.glob("*.base")
    content = base.read_bytes()
    for broken in (content[:-1], content[:-60], content[:100] + bytes([content[100] ^ 4]) + content[101:]):
        base.write_bytes(broken)
        with pytest.raises(StoreBroken, match=r"is corrupt|cannot be applied"):
            opened(tmp_path)
    base.unlink()
    with pytest.raises(StoreBroken, match="is incomplete: its base includes entries up to 0"):
        opened(tmp_path)
