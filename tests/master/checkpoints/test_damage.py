"""Files that are cut off, changed, missing or of another checkpoint are refused by name; an older one is offered."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.writing import write_checkpoint
from tests.master.checkpoints.jobs import JOB, created, dense_of, progress_of, rows, train

ROWS = "table-0001-00000.safetensors"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two checkpoints, of versions 2 and 5."""
    with created(MemoryStore()) as store:
        for version in (2, 5):
            train(store, version - store.version())
            write_checkpoint(tmp_path, store, dense_of(version), JOB, progress_of(version))
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 0x10
    file.write_bytes(content)


def other(file: Path) -> None:
    shutil.copy(file.parent.parent / "ckpt-0000000002" / file.name, file)


def extra(file: Path) -> None:
    shutil.copy(file, file.parent / "foreign.safetensors")


DAMAGES: list[tuple[Callable[[Path], None], str, str]] = [
    (Path.unlink, ROWS, "{}: missing"),
    (Path.unlink, "dense.safetensors", "{}: missing"),
    (Path.unlink, "manifest.json", "{}: cannot be read"),
    (cut, ROWS, "{}: it has [0-9]+ bytes, and was written with [0-9]+"),
    (emptied, ROWS, "{}: it has 0 bytes"),
    (cut, "manifest.json", "{}: cannot be read: it is no manifest of a checkpoint"),
    (emptied, "manifest.json", "{}: cannot be read: it is no manifest of a checkpoint"),
    (other, "manifest.json", "{}: it is the manifest of another checkpoint, of version 2"),
    (extra, ROWS, "foreign.safetensors: it does not belong to this checkpoint"),
]


@pytest.mark.parametrize(("damage", "name", "told"), DAMAGES)
def test_damage_that_is_seen_at_once(home: Path, damage: Callable[[Path], None], name: str, told: str) -> None:
    newest, older = home / "ckpt-0000000005", home / "ckpt-0000000002"
    damage(newest / name)
    with pytest.raises(CheckpointError, match=told.format(re.escape(str(newest / name)))) as raised:
        open_checkpoint(home)
    assert f"an older checkpoint next to it is intact: {older} (version 2)" in str(raised.value)
    open_checkpoint(older).verify()


@pytest.mark.parametrize("name", [ROWS, "dense.safetensors", "table-0003-state.safetensors"])
def test_damage_that_is_seen_when_it_is_read(home: Path, name: str) -> None:
    newest = home / "ckpt-0000000005"
    flipped(newest / name)
    found = open_checkpoint(home)
    told = re.escape(f"{newest / name}: its bytes are not the ones that were written")
    offered = f"; an older checkpoint next to it is intact: .*{re.escape('ckpt-0000000002 (version 2)')}"
    with pytest.raises(CheckpointError, match=told + offered):
        found.verify()
    with MemoryStore() as store:
        if name == "dense.safetensors":
            with pytest.raises(CheckpointError, match=told + offered):
                found.dense()
        else:
            with pytest.raises(CheckpointError, match=told + offered):
                restore_tables(found, store)
    with created(MemoryStore()) as store:
        train(store, 3)
        before = rows(store)
        if name != "dense.safetensors":
            with pytest.raises(CheckpointError, match=told):
                restore_tables(found, store)
        assert rows(store) == before
        assert store.version() == 3


def test_a_store_that_was_empty_is_empty_again(home: Path) -> None:
    flipped(home / "ckpt-0000000005" / "table-0003-00000.safetensors")  # of the last table
    with MemoryStore() as store:
        with pytest.raises(CheckpointError, match="its bytes are not the ones"):
            restore_tables(open_checkpoint(home), store)
        assert store.specs() == {}
        assert store.version() == 0


def test_one_of_the_same_size_from_another_checkpoint_says_whose_it_is(home: Path) -> None:
    newest = home / "ckpt-0000000005"
    shutil.copy(home / "ckpt-0000000002" / "dense.safetensors", newest / "dense.safetensors")
    with pytest.raises(CheckpointError, match="written: it is a file of a checkpoint of version 2"):
        open_checkpoint(home).dense()


def test_no_older_one_is_offered_where_none_is_whole(home: Path) -> None:
    flipped(home / "ckpt-0000000002" / ROWS)
    (home / "ckpt-0000000005" / ROWS).unlink()
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(home)
    assert "is whole" not in str(raised.value)


@pytest.mark.parametrize("place", range(0, 3000, 97))
def test_no_flipped_bit_of_a_manifest_is_taken_for_truth(home: Path, place: int) -> None:
    file = home / "ckpt-0000000005" / "manifest.json"
    before, content = open_checkpoint(home).manifest, bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << place % 8
    file.write_bytes(content)
    try:
        found = open_checkpoint(home)
    except CheckpointError:
        return
    assert found.manifest == before  # only the space between the words differs


def test_another_format_is_refused_by_name(home: Path) -> None:
    file = home / "ckpt-0000000005" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1}))
    with pytest.raises(CheckpointError, match="format 1; this version reads format 2"):
        open_checkpoint(home)


def test_a_table_that_is_not_in_it_is_named(home: Path) -> None:
    with MemoryStore() as store, pytest.raises(CheckpointError, match="has no table 'users'; its tables are aged, dyn"):
        restore_tables(open_checkpoint(home), store, tables=["users"])
