"""Manifests and files whose checksums are right and whose content makes no sense, as somebody else may write them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.storage.manifest import Manifest
from elastable.master.checkpoints.storage.tensor_file import parts_of, tensors_in
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.tasks.progress import Progress
from tests.master.checkpoints.jobs import JOB, created, dense_of, progress_of, train

DEEP = "[" * 100_000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with MemoryStore(1) as store:
        created(store)
        train(store, 2)
        return Path(write_checkpoint(tmp_path, store, dense_of(2), JOB, progress_of(2)))


def sealed(place: Path, fields: dict[str, object]) -> None:
    fields.pop("checksum", None)
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["checksum"] = hashlib.sha256(plain.encode()).hexdigest()
    (place / "manifest.json").write_text(json.dumps(fields))


def changed(change: Callable[..., object]) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        fields = json.loads((place / "manifest.json").read_text())
        change(fields)
        sealed(place, fields)

    return write


@pytest.mark.parametrize(
    "damage",
    [
        lambda place: (place / "manifest.json").write_text(DEEP),
        lambda place: (place / "manifest.json").write_text("[]"),
        changed(lambda fields: fields.update(version=float("inf"))),
        changed(lambda fields: fields.update(tables=[3])),
        changed(lambda fields: fields["tables"]["fixed"]["spec"].update(name=7)),
        changed(lambda fields: fields.update(base=[1])),
        changed(lambda fields: fields.update(files=3)),
    ],
)
def test_a_manifest_that_makes_no_sense(place: Path, damage: Callable[[Path], None]) -> None:
    damage(place)
    with pytest.raises(CheckpointError):
        open_checkpoint(place)


def test_a_place_of_a_job_that_makes_no_sense(place: Path) -> None:
    changed(lambda fields: fields["progress"].update(metrics=float("nan")))(place)
    with pytest.raises(CheckpointError, match="no progress of a job"):
        open_checkpoint(place).progress()
    with pytest.raises(CheckpointError):
        Progress.from_json(DEEP)


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


def test_a_text_that_is_no_manifest() -> None:
    for text in (b"", b"\xff", b"3", DEEP.encode(), b'{"format": 1}', b'{"format": 2, "checksum": []}'):
        with pytest.raises(CheckpointError):
            Manifest.from_json(text)
