"""A memory store with a history is killed at any moment, and comes back as if nothing had happened."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store import Commit, EmbeddingStore, MemoryStore
from elastable.embedding_store.engine import staged_commit, store_history
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreBroken, StoreFailed, Unavailable
from elastable.embedding_store.log import segment
from tests.contracts.store_history import (
    MOST,
    SPECS,
    TRAINED,
    History,
    Program,
    Random,
    commit_of,
    everything,
    programs,
)
from tests.contracts.store_samples import create_tables
from tests.file_stores import quick_folder
from tests.plugins.seeds import examples


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


def step(store: EmbeddingStore, numbers: list[int], seed: int, names: list[str]) -> None:
    commit = commit_of(store.version() + 1, numbers, seed, names)
    store.commit(replace(commit, record=None if seed % 3 == 0 else b"record %d" % seed))


class Reopened(History):
    """Its store is killed and comes back from files, which lie in `folder / str(lives)`."""

    calls = (*History.calls, "kill", "reset")

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        super().__init__(store)
        self.folder, self.lives = folder, 0

    def make_commit(self, commit: Commit) -> None:
        frozen = (*commit.frozen, "few") if commit.version % 2 and "few" not in commit.updates else commit.frozen
        super().make_commit(replace(commit, record=b"record %d" % commit.version, frozen=frozen))

    def reset(self, random: Random) -> None:
        version = int(random.integers(31))
        if self.unless_pinned(random, lambda store: store.reset_version(version)):
            for name in [name for name in self.models if SPECS[name].eviction is not None]:
                del self.models[name]  # it would have to know which commits count

    def copied(self) -> Path:
        self.lives += 1
        return Path(shutil.copytree(self.folder / str(self.lives - 1), self.folder / str(self.lives)))

    def open_again(self, opened: Callable[[], MemoryStore], record: bytes | None) -> None:
        """The store's next life begins, without pins: it reads no clock, though rows go with time."""
        self.pins.clear()
        with patch.object(staged_commit, "CLOCK", None):
            self.store = opened()
        assert self.store.record() == record
        shutil.rmtree(self.folder / str(self.lives - 1))
        self.compare(self.names)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder)


class Logged(Reopened):
    def __init__(self, log_bytes: int) -> None:
        self.log_bytes, folder = log_bytes, quick_folder()
        super().__init__(folder, opened(folder / "0", log_bytes))

    def kill(self, random: Random) -> None:
        """What lies in files now is all that is left; the last write may have been torn."""
        record, folder = self.store.record(), self.copied()
        newest = sorted(folder.glob("*.log"))[-1]
        with newest.open("ab") as file:
            file.write(random.bytes(int(random.integers(60))))
        self.store.close()
        self.open_again(lambda: opened(folder, self.log_bytes), record)

    def settle(self) -> None:
        assert isinstance(self.store, MemoryStore)
        base_written(self.store)  # so that what happens does not depend on threads


@settings(max_examples=examples(48))
@given(programs(Logged), st.sampled_from([200, 4_000, 1 << 30]))
def test_a_store_with_a_history_is_killed_at_any_moment(program: Program, log_bytes: int) -> None:
    Logged(log_bytes).play(program)


def test_the_version_before_can_be_gone_back_to(tmp_path: Path) -> None:
    with create_tables(opened(tmp_path), *SPECS.values()) as store:
        for seed in range(6):
            before, record = everything(store), store.record()
            step(store, [1, 2, 5 + seed], seed, TRAINED)
        pin = store.pin()
        assert store.recover() == 0
        pin.renew()
        assert store.recover(5) > 2 * len(TRAINED)
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
    held, real = threading.Event(), segment.write_base

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
        why = r"version 2 is not logged.*No space left on device \(free space on its disk\)\. Mend that.*commits it"
        with pytest.raises(Unavailable, match=rf"{why}.*or open {tmp_path}/s again, at version 1"):
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
