"""A folder that the last release's file store wrote becomes one of this release, wherever the upgrade is killed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.tiered.store_tier import StoreTier
from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.log.files.folder_lock import FolderLock
from elastable.embedding_store.log.no_log import NoLog
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.upgrade import file_upgrade
from elastable.embedding_store.upgrade.file_upgrade import refuse_earlier_folder, upgrade_folder
from tests.embedding_store.earlier_release.earlier_stores import (
    VERSION,
    file_store,
    require_as_released,
    require_same_training,
)


def upgraded(folder: Path) -> bool:
    return upgrade_folder(folder, FileTier, lambda table, rows: None)


def opened(folder: Path) -> MemoryStore:
    store = MemoryStore(threads=1)
    store.keep_tier(StoreTier(FileTier(folder), NoLog(), 1 << 20), every_s=3600.0)
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return file_store(tmp_path)


def test_every_row_slot_touch_and_state_is_as_it_was(folder: Path) -> None:
    with pytest.raises(StoreFailed, match=r"a store of an earlier release.*elastable store upgrade file:///"):
        refuse_earlier_folder(folder)
    assert upgraded(folder)
    assert not upgraded(folder)
    refuse_earlier_folder(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with opened(folder) as store:
        assert store.version() == VERSION
        require_as_released(store, "file")
    with opened(folder) as store:  # as this release has written it
        require_as_released(store, "file")


def test_training_goes_on_to_the_same_bits(folder: Path) -> None:
    upgraded(folder)
    with opened(folder) as store:
        require_same_training(store, until=11)


class Killed(BaseException):
    """Nobody catches it: the process is gone."""


def dying_at(patch: pytest.MonkeyPatch, target: object, name: str, call: int) -> None:
    """The process dies before the n-th call."""
    plain, calls = getattr(target, name), [0]

    def dying(*arguments: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return plain(*arguments, **named)

    patch.setattr(target, name, dying)


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        (FileTier, "create", 1),
        (FileTier, "write", 1),
        (FileTier, "write", 4),
        (FileTier, "put_state", 1),
        (os, "rename", 1),
        (os, "rename", 2),
        (file_upgrade, "sync_folder", 1),
        (shutil, "rmtree", 2),
    ],
)
def test_killed_anywhere_it_is_repeated(
    folder: Path, target: object, name: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        dying_at(patch, target, name, call)
        with pytest.raises(Killed):
            upgraded(folder)
    assert upgraded(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with opened(folder) as store:
        assert store.version() == VERSION
        require_as_released(store, "file")


def test_until_it_is_done_the_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, suppress(Killed):
        dying_at(patch, os, "rename", 2)
        upgraded(folder)
    assert not folder.exists()
    with pytest.raises(StoreFailed, match="elastable store upgrade"):  # and no new store is begun in its place
        refuse_earlier_folder(folder)


def test_what_cannot_be_upgraded_is_left_as_it_is(tmp_path: Path) -> None:
    unclean = file_store(tmp_path / "unclean", clean=False)
    with pytest.raises(StoreBroken, match=r"not closed cleanly.*restore a checkpoint"):
        upgraded(unclean)
    folder = file_store(tmp_path / "clean")
    held = FolderLock(folder)
    with pytest.raises(StoreFailed, match="is open already"):
        upgraded(folder)
    held.release()
    rows = folder / "000004" / "weights.rows"
    content = bytearray(rows.read_bytes())
    content[4096 + 12] ^= 1
    rows.write_bytes(content)
    with pytest.raises(StoreBroken, match=r"weights.rows is corrupt"):
        upgraded(folder)
    assert (folder / "manifest.json").exists()
