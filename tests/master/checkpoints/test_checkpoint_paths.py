"""What a manifest names lies in its folder: paths, links, pipes and a checkpoint as its own base are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.writing import write_checkpoint
from tests.master.checkpoints.jobs import JOB, created, dense_of, progress_of, train
from tests.master.checkpoints.test_malformed import changed, sealed


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with MemoryStore(1) as store:
        created(store)
        train(store, 2)
        return Path(write_checkpoint(tmp_path, store, dense_of(2), JOB, progress_of(2)))


def moved_to(path: str) -> Callable[[Path], None]:
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


def base_at(name: str) -> Callable[[Path], None]:
    return changed(lambda fields: fields.update(base={"name": name, "version": 1, "checksum": "0"}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (moved_to("../rows"), "'../rows', which is no name of a file in its folder"),
        (moved_to("{home}/rows"), "/rows', which is no name of a file in its folder"),
        (base_at("../elsewhere/ckpt-0000000001"), "which is no name of a file in its folder"),
        (base_at("/elsewhere"), "which is no name of a file in its folder"),
        (base_at(".."), "which is no name of a file in its folder"),
        (base_at(""), "which is no name of a file in its folder"),
        (base_at("ckpt-0000000002"), "builds upon itself"),
    ],
)
def test_no_path_of_a_manifest_leads_out_of_its_folder(place: Path, damage: Callable[[Path], None], told: str) -> None:
    damage(place)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(place)


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
