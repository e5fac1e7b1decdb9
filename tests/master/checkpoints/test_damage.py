"""Damaged, malformed and hostile checkpoints are refused by name, and an older intact one is offered."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.storage.tensor_file import parts_of, tensors_in
from tests.master.checkpoints.jobs import created, flip, rows, train, written

ROWS = "table-0001-00000.safetensors"
Damage = Callable[[Path], None]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two checkpoints, of versions 2 and 5."""
    with created(MemoryStore()) as store:
        for version in (2, 5):
            train(store, version - store.version())
            written(tmp_path, store)
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def grown(file: Path) -> None:
    os.truncate(file, (256 << 20) + 1)


def of_another(file: Path) -> None:
    shutil.copy(file.parent.parent / "ckpt-0000000002" / file.name, file)


def foreign(file: Path) -> None:
    shutil.copy(file, file.parent / "foreign.safetensors")


DAMAGES: list[tuple[Damage, str, str]] = [
    (Path.unlink, ROWS, "{}: missing"),
    (Path.unlink, "dense.safetensors", "{}: missing"),
    (Path.unlink, "manifest.json", "{}: cannot be read"),
    (cut, ROWS, "{}: it has [0-9]+ bytes, and was written with [0-9]+"),
    (emptied, ROWS, "{}: it has 0 bytes"),
    (cut, "manifest.json", "{}: cannot be read: it is no manifest of a checkpoint"),
    (emptied, "manifest.json", "{}: cannot be read: it is no manifest of a checkpoint"),
    (grown, "manifest.json", "{}: cannot be read: .*it has 268,435,457 bytes or more, and may have 268,435,456"),
    (of_another, "manifest.json", "{}: it is the manifest of another checkpoint, of version 2"),
    (foreign, ROWS, "foreign.safetensors: it does not belong to this checkpoint"),
]


@pytest.mark.parametrize(("damage", "name", "message"), DAMAGES)
def test_damage_that_is_seen_at_once(home: Path, damage: Damage, name: str, message: str) -> None:
    newest, older = home / "ckpt-0000000005", home / "ckpt-0000000002"
    damage(newest / name)
    with pytest.raises(CheckpointError, match=message.format(re.escape(str(newest / name)))) as raised:
        open_checkpoint(home)
    assert f"an older checkpoint next to it is intact: {older} (version 2)" in str(raised.value)
    open_checkpoint(older).verify()


@pytest.mark.parametrize("name", [ROWS, "dense.safetensors", "table-0003-state.safetensors"])
def test_damage_that_is_seen_when_it_is_read(home: Path, name: str) -> None:
    newest = home / "ckpt-0000000005"
    flip(newest / name)
    found = open_checkpoint(home)
    message = re.escape(f"{newest / name}: its bytes are not the ones that were written")
    offered = f"; an older checkpoint next to it is intact: .*{re.escape('ckpt-0000000002 (version 2)')}"
    with pytest.raises(CheckpointError, match=message + offered):
        found.verify()
    with MemoryStore() as store:
        if name == "dense.safetensors":
            with pytest.raises(CheckpointError, match=message + offered):
                found.dense()
        else:
            with pytest.raises(CheckpointError, match=message + offered):
                restore_tables(found, store)
    with created(MemoryStore()) as store:
        train(store, 3)
        before = rows(store)
        if name != "dense.safetensors":
            with pytest.raises(CheckpointError, match=message):
                restore_tables(found, store)
        assert rows(store) == before
        assert store.version() == 3


def test_a_store_that_was_empty_is_empty_again(home: Path) -> None:
    flip(home / "ckpt-0000000005" / "table-0003-00000.safetensors")  # of the last table
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
    flip(home / "ckpt-0000000002" / ROWS)
    (home / "ckpt-0000000005" / ROWS).unlink()
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(home)
    assert "is whole" not in str(raised.value)


@pytest.mark.parametrize("place", range(0, 3000, 333))
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


def test_a_table_that_is_not_in_it_is_named(home: Path) -> None:
    with MemoryStore() as store, pytest.raises(CheckpointError, match="has no table 'users'; its tables are aged, dyn"):
        restore_tables(open_checkpoint(home), store, tables=["users"])


DEEP = "[" * 100_000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with MemoryStore(1) as store:
        created(store)
        train(store, 2)
        return Path(written(tmp_path, store))


def sealed(place: Path, fields: dict[str, object]) -> None:
    fields.pop("checksum", None)
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["checksum"] = hashlib.sha256(plain.encode()).hexdigest()
    (place / "manifest.json").write_text(json.dumps(fields))


def changed(change: Callable[..., object]) -> Damage:
    def write(place: Path) -> None:
        fields = json.loads((place / "manifest.json").read_text())
        change(fields)
        sealed(place, fields)

    return write


def test_a_place_of_a_job_that_makes_no_sense(place: Path) -> None:
    changed(lambda fields: fields["progress"].update(metrics=float("nan")))(place)
    with pytest.raises(CheckpointError, match="no progress of a job"):
        open_checkpoint(place).progress()


def test_a_tensor_of_a_hundred_thousand_dimensions_is_refused_before_its_lengths_are_multiplied() -> None:
    entry = {"dtype": "F32", "shape": [9] * 100_000, "data_offsets": [0, 0]}
    header = json.dumps({"a": entry}).encode()
    content = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    with pytest.raises(ValueError, match="a tensor of 100000 dimensions"):
        tensors_in(content)


@pytest.mark.parametrize("left_out", ["ids", "weights", "slots"])
def test_a_file_of_rows_without_one_of_its_tensors_is_named(place: Path, left_out: str) -> None:
    fields = json.loads((place / "manifest.json").read_text())
    file = fields["tables"]["fixed"]["files"][0]
    tensors, _ = tensors_in(np.fromfile(place / file, np.uint8))
    content = b"".join(parts_of({name: [one] for name, one in tensors.items() if name != left_out}, {}))
    (place / file).write_bytes(content)
    fields["files"][file] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    sealed(place, fields)
    with MemoryStore(1) as store, pytest.raises(CheckpointError, match=f"{file}: holds .* where a checkpoint holds"):
        restore_tables(open_checkpoint(place), store)


@pytest.mark.parametrize(
    "header", ["3", "[]", '{"__metadata__": 7}', '{"a": {"dtype": "F32", "shape": [Infinity]}}', DEEP]
)
def test_a_header_that_is_none_of_safetensors(header: str) -> None:
    content = len(header).to_bytes(8, "little") + header.encode()
    with pytest.raises(ValueError, match="none of safetensors"):
        tensors_in(np.frombuffer(content, np.uint8))


def text(content: bytes) -> Damage:
    return lambda place: (place / "manifest.json").write_bytes(content)  # type: ignore[return-value]


def moved_to(path: str) -> Damage:
    """The manifest names a file of rows by a path, and one of the same bytes is there."""

    def write(place: Path) -> None:
        fields = json.loads((place / "manifest.json").read_text())
        file = fields["tables"]["fixed"]["files"][0]
        target = place / path.format(home=place.parent)
        target.write_bytes((place / file).read_bytes())
        fields["files"][str(path.format(home=place.parent))] = fields["files"].pop(file)
        fields["tables"]["fixed"]["files"][0] = str(path.format(home=place.parent))
        (place / file).unlink()
        sealed(place, fields)

    return write


def base_at(name: str) -> Damage:
    return changed(lambda fields: fields.update(base={"name": name, "version": 1, "checksum": "0"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (moved_to("../rows"), "'../rows', which is no name of a file in its folder"),
        (moved_to("{home}/rows"), "/rows', which is no name of a file in its folder"),
        (base_at("../elsewhere/ckpt-0000000001"), "which is no name of a file in its folder"),
        (base_at("/elsewhere"), "which is no name of a file in its folder"),
        (base_at(".."), "which is no name of a file in its folder"),
        (base_at(""), "which is no name of a file in its folder"),
        (base_at("ckpt-0000000002"), "builds upon itself"),
        *(
            (text(other), "cannot be read")
            for other in (b"", b"\xff", b"3", b"[]", DEEP.encode(), b'{"format": 4, "checksum": []}')
        ),
        (text(b'{"format": 1}'), "format 1; this version reads format 4"),
        (changed(lambda fields: fields.update(version=float("inf"))), "cannot be read"),
        (changed(lambda fields: fields.update(tables=[3])), "cannot be read"),
        (changed(lambda fields: fields["tables"]["fixed"]["spec"].update(name=7)), "cannot be read"),
        (changed(lambda fields: fields.update(base=[1])), "cannot be read"),
        (changed(lambda fields: fields.update(files=3)), "cannot be read"),
        (changed(lambda fields: fields.update(job=0.5)), "its job is 0.5"),
        (changed(lambda fields: fields.update(progress=[])), r"its progress is \[\]"),
    ],
)
def test_no_path_of_a_manifest_leads_out_of_its_folder(place: Path, damage: Damage, message: str) -> None:
    damage(place)
    for given in (place, place.parent):  # the checkpoint, and the folder of all of them
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(given)


@pytest.mark.parametrize("path", ["../rows", "/etc/hostname", "other.safetensors"])
def test_a_table_whose_rows_are_in_no_file_of_the_manifest(place: Path, path: str) -> None:
    changed(lambda fields: fields["tables"]["fixed"].update(files=[path]))(place)
    with MemoryStore(1) as store, pytest.raises(CheckpointError, match=f"{path}' is none of the files in its manifest"):
        restore_tables(open_checkpoint(place), store)


@pytest.mark.parametrize("file", ["dense.safetensors", "manifest.json"])
def test_links_and_pipes_in_a_checkpoint_are_not_read(place: Path, file: str) -> None:
    content, path = (place / file).read_bytes(), place / file
    path.rename(place.parent / "elsewhere")
    path.symlink_to(place.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{file}: cannot be read"):
        open_checkpoint(place).dense()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=file):
        open_checkpoint(place).dense()
    path.unlink()
    path.write_bytes(content)
    open_checkpoint(place).dense()
