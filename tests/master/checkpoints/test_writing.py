"""Checkpoints written and read again, wherever they lie and whatever holds the rows."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from elastable.embedding_store.composite import PartitionedStore
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles
from elastable.master.checkpoints.storage.checkpoint_locations import files_at, newest_checkpoint
from elastable.master.checkpoints.writing import write_checkpoint
from tests.master.checkpoints.jobs import JOB, created, dense_of, progress_of, rows, train


@pytest.fixture(params=["path", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = uuid.uuid4().hex
    yield {"path": str(tmp_path), "file": f"file://{tmp_path}/deep/er", "memory": f"memory://{name}/deep"}[
        request.param
    ]
    memory = fsspec.filesystem("memory")
    if memory.exists(name):
        memory.rm(name, recursive=True)


def shards(count: int, strategy: str) -> PartitionedStore:
    return PartitionedStore([MemoryStore(threads=1) for _ in range(count)], strategy)


def saved(place: str | Path, store: EmbeddingStore, keep: int = 3) -> str:
    version = store.version()
    return write_checkpoint(place, store, dense_of(version), JOB, progress_of(version), keep=keep)


@pytest.mark.parametrize("source", ["one", "token", "encoding"])
def test_everything_comes_back_on_any_store(place: str, source: str) -> None:
    made = MemoryStore() if source == "one" else shards(2, source)
    with created(made) as store:
        train(store, 7)
        address = saved(place, store)
        assert address == newest_checkpoint(place) == newest_checkpoint(address)
        found = open_checkpoint(place)
        assert (found.version, found.manifest.kind, found.address) == (7, "full", address)
        assert found.progress() == progress_of(7)
        assert found.job["job"] == "small"
        assert "secret" not in found.manifest.to_json()
        assert found.manifest.rows == len(rows(store))
        dense = found.dense()
        assert set(dense) == set(dense_of(7))
        for key, tensor in dense_of(7).items():
            np.testing.assert_array_equal(dense[key], tensor, strict=True)
        for target in (MemoryStore(), shards(3, "token"), shards(2, "encoding")):
            with target:
                restored = restore_tables(found, target)
                assert target.version() == 7
                assert sum(restored.values()) == len(rows(store))
                assert rows(target) == rows(store)


def test_it_is_written_beside_training(tmp_path: Path) -> None:
    with created(MemoryStore()) as store, MemoryStore() as other:
        train(store, 5)
        expected = rows(store)
        with store.pin() as pin:
            written: list[str] = []
            thread = threading.Thread(
                target=lambda: written.append(write_checkpoint(tmp_path, pin, {}, JOB, progress_of(5)))
            )
            thread.start()
            train(store, 20)
            thread.join(60.0)
        restore_tables(open_checkpoint(written[0]), other)
        assert rows(other) == expected != rows(store)


def test_rows_of_another_version_are_refused(tmp_path: Path) -> None:
    with created(MemoryStore()) as store:
        train(store, 2)
        with pytest.raises(BadInput, match="of version 3 cannot be written of rows that are at version 2"):
            write_checkpoint(tmp_path, store, {}, JOB, progress_of(3))
    assert list(tmp_path.iterdir()) == []


def test_a_commit_meanwhile_is_noticed(tmp_path: Path) -> None:
    class Committing(LocalFiles):
        def begin(self, name: str) -> str:
            train(store, 1)
            return super().begin(name)

    with created(MemoryStore()) as store:
        train(store, 2)
        with pytest.raises(BadInput, match="rows that are at version 3: pin them, or commit nothing meanwhile"):
            write_checkpoint(Committing(tmp_path), store, {}, JOB, progress_of(2))
    assert list(tmp_path.iterdir()) == []


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    with created(MemoryStore()) as store:
        train(store, 3)
        checkpoint = Path(saved(tmp_path, store))
        held: dict[int, bytes] = {}
        for file in open_checkpoint(checkpoint).manifest.tables["fixed"].files:
            tensors = load_file(checkpoint / file)
            held.update({int(one): row.tobytes() for one, row in zip(tensors["ids"], tensors["weights"], strict=True)})
        assert held == {one: row[0] for (table, one), row in rows(store).items() if table == "fixed"}


def test_the_same_version_again_takes_the_place_of_the_first(place: str) -> None:
    with created(MemoryStore()) as store:
        train(store, 3)
        first, second = saved(place, store, keep=0), saved(place, store, keep=0)
        assert (Path(first).name, Path(second).name) == ("ckpt-0000000003", "ckpt-0000000003-2")
        assert newest_checkpoint(place) == second
        assert files_at(place).names() == ["ckpt-0000000003-2"]
        train(store, 1)
        assert Path(saved(place, store, keep=1)).name == "ckpt-0000000004"
        assert files_at(place).names() == ["ckpt-0000000004"]


@pytest.mark.parametrize("url", ["nothing://x/y", "s4://bucket"])
def test_a_url_of_an_unknown_kind_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match=url.partition(":")[0]):
        open_checkpoint(url)


def test_nothing_there_is_said_so(place: str) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint there; expected a folder ckpt-<version>"):
        open_checkpoint(place)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with created(MemoryStore()) as store, pytest.raises(CheckpointError, match="file/deep/ckpt-0000000000 cannot be"):
        write_checkpoint(tmp_path / "file" / "deep", store, {}, JOB, progress_of(0))
