"""A Redis that has lost a part of its rows is refused; an empty store goes on from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.open_store import open_store
from elastable.jobs.resume import Beginning, fill_store
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.commits.dense_part import NoDense
from tests.master.checkpoints.jobs import DYNAMIC, FIXED, JOB, created, dense_of, progress_of, rows, train
from tests.servers import running_server


class Dense(NoDense):
    """Takes what a checkpoint holds."""

    def restore(self, tensors: object) -> None:
        """As in `DenseState`."""


def resume(store: EmbeddingStore, home: Path | None, job: JobSpec = JOB, overwrite: bool = False) -> Beginning:
    checkpoint = None if home is None else open_checkpoint(home)
    tables = {spec.name: spec for spec in (FIXED, DYNAMIC)}
    return fill_store(
        store, tables, Dense(), job, checkpoint=checkpoint, resume=True, overwrite=overwrite  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_job_goes_on_from_its_checkpoint_in_an_empty_store(server_binary: Path, tmp_path: Path) -> None:
    with running_server(server_binary, tmp_path / "redis") as server:
        with open_store(server.url) as store:
            created(store, (FIXED, DYNAMIC))
            train(store, 3)
            saved = rows(store)
            write_checkpoint(tmp_path / "kept", store, dense_of(3), JOB, progress_of(3))
            train(store, 1)
        with server.client() as client:
            lost = next(key for key in sorted(client.scan_iter("*")) if client.type(key) == b"hash" and b"fixed" in key)
            client.delete(lost)
        with pytest.raises(StoreBroken, match=r"has lost data of .* of table 'fixed'.*Go back to a checkpoint"):
            open_store(server.url)
        with open_store(f"{server.url}?namespace=empty") as store:
            begun = resume(store, tmp_path / "kept")
            assert begun.progress == progress_of(3)
            assert begun.checkpoint is not None
            assert rows(store) == saved
            train(store, 1)
            assert store.version() == 4
