"""Host embeddings in files: written by some replicas, read by others, refused where they are damaged."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, CheckpointError, StoreFailed
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.file import load_host_embedding, save_host_embedding
from elastable.replicas.host_embeddings.host_table import HostTable
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec
from tests.contracts.host_table_contract import random_steps, train
from tests.replicas.host_embeddings.tables import create_host_table


def table_for(group: ReplicaGroup | None = None, strategy: str = "TOKEN", dim: int = 7) -> HostTable:
    optimizer = HostEmbeddingOptimizerSpec(0.1, "adam", accumulation_factor=2)
    return create_host_table("t", (13, dim), partition_strategy=strategy, optimizer_spec=optimizer, group=group)


def test_files_are_read_by_any_number_of_replicas(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"

    def write(group: ReplicaGroup) -> dict[str, Array]:
        table = table_for(group)
        train(table, random_steps(13, 7, 3, 5))
        save_host_embedding(table, path)
        save_host_embedding(table, path)  # in place of the first
        return table.state()

    def read(group: ReplicaGroup) -> dict[str, Array]:
        table = table_for(group, "ENCODING")
        load_host_embedding(table, path)
        return table.state()

    written = run_threads(3, write)[0]
    tensors = load_file(path)  # of the safetensors library
    assert tensors.keys() == written.keys()
    for state in (*run_threads(4, read), tensors):
        for name, values in written.items():
            np.testing.assert_array_equal(state[name], values)
    assert [file.name for file in tmp_path.iterdir()] == ["t.safetensors"]


def test_files_that_cannot_be_read_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path, table = tmp_path / "t.safetensors", table_for()
    save_host_embedding(table, path)
    before, content = table.state(), path.read_bytes()
    damaged = bytearray(content)
    damaged[-5] ^= 1
    for broken, message in ((damaged, "is damaged"), (content[:50], "cannot be read"), (b"", "0 bytes are no")):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=message):
            load_host_embedding(table, path)
    with pytest.raises(CheckpointError, match="No such file"):
        load_host_embedding(table, tmp_path / "other.safetensors")
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"'pending/gradients' must be float32 \[n, 8\], got float32 \[0, 7\]"):
        load_host_embedding(table_for(dim=8), path)
    for name, values in table.state().items():
        np.testing.assert_array_equal(values, before[name])


def test_a_failed_write_is_raised_on_every_replica(tmp_path: Path) -> None:
    def work(group: ReplicaGroup) -> object:
        with pytest.raises((CheckpointError, StoreFailed), match="host embedding 't' cannot be written to") as caught:
            save_host_embedding(table_for(group), tmp_path / "missing" / "t.safetensors")
        return type(caught.value)

    assert run_threads(2, work) == [CheckpointError, StoreFailed]
