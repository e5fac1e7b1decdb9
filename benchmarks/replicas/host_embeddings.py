"""Host embeddings over replicas in threads: token compared with encoding, by the shape of the table.

A step is a lookup and its update with SGD. Shapes are those of language
models (far more rows than columns) and of games (few, wide rows). Time is
processor time of one replica's thread: replicas share the cores here, so
waiting for each other says nothing about separate machines. Every figure is
compared with the other strategy's in the same rounds; the last rows with a
plain copy of as many bytes as a step moves, which is the limit.

    python -m benchmarks host_embeddings
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Row, compare, publish
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.range_pool import available_cores
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.host_embedding import bytes_per_step, create_host_embedding
from elastable.replicas.host_embeddings.host_table import HostEmbeddingOptimizerSpec, HostTable

# Rows, columns, ids of each replica.
_SHAPES = (
    (4_000_000, 8, 4096),
    (4_000_000, 32, 4096),
    (1_000_000, 128, 4096),
    (100_000, 128, 4096),
    (10_000, 512, 1024),
    (1000, 1024, 1024),
    (1000, 4096, 256),
)
_REPLICAS = (2, 3, 4)
_ROUNDS, _WARM_UP, _BATCHES = 31, 8, 4
_WAYS: dict[str, dict[str, Any]] = {
    "token": {"partition_strategy": "TOKEN"},
    "encoding": {"partition_strategy": "ENCODING"},
}


def main() -> None:
    """Measures, prints and writes `results/host_embeddings.json`."""
    publish("host_embeddings", f"Host embeddings, replicas in threads, {available_cores()} cores", measured())


def measured() -> list[Row]:
    """The rows of the table."""
    return [row for shape in _SHAPES for replicas in _REPLICAS for row in _of_shape(*shape, replicas)]


def _of_shape(rows: int, dim: int, lookups: int, replicas: int) -> Iterator[Row]:
    rounds = run_threads(replicas, lambda group: _rounds(group, rows, dim, lookups), deadline_s=600.0)[0]
    description = f"{rows:,} x {dim}, {lookups} ids, n={replicas}"
    yield compare(f"encoding, {description}; vs. token", "us", rounds["encoding"], rounds["token"])
    yield compare(f"token, {description}; vs. a copy of its rows and gradients", "us", rounds["token"], rounds["copy"])
    for strategy in ("TOKEN", "ENCODING"):
        sent = rounds[f"{strategy.lower()} bytes"][-1]
        ids, values = bytes_per_step(strategy, rows, dim, replicas, lookups)
        reckoned = ids + 2 * values
        name = f"{strategy.lower()}, bytes a replica sends in a step, {description}; vs. the formula"
        yield Row(name, sent, "bytes", reckoned, sent / reckoned)


def _rounds(group: ReplicaGroup, rows: int, dim: int, lookups: int) -> dict[str, list[float]]:
    random = np.random.default_rng(group.rank)
    batches = [random.integers(0, rows, lookups) for _ in range(_BATCHES)]
    spec = HostEmbeddingOptimizerSpec(0.1)
    tables = {
        name: create_host_embedding(
            name, (rows, dim), optimizer_spec=spec, initializer="zeros", group=group, threads=1, **way
        ).table
        for name, way in _WAYS.items()
    }
    gradients = np.ones((lookups, dim), np.float32)
    found: dict[str, list[float]] = {name: [] for name in (*tables, "copy", "token bytes", "encoding bytes")}
    for number in range(_WARM_UP + _ROUNDS):
        ids = batches[number % _BATCHES]
        for name, table in tables.items():
            before = group.bytes_sent
            found[name].append(_seconds(table, ids, gradients) * 1e6)
            if f"{name} bytes" in found:
                found[f"{name} bytes"].append(group.bytes_sent - before - _REGISTRATION * (group.size - 1))
        began = time.thread_time()
        for _ in range(4):  # rows into an exchange and out of it, and gradients
            gradients.copy()
        found["copy"].append((time.thread_time() - began) * 1e6)
    for table in tables.values():
        table.close()
    return {name: values[_WARM_UP:] for name, values in found.items()}


_REGISTRATION = 9  # bytes to each other replica: the length of an error that there is not, and the barrier


def _seconds(table: HostTable, ids: Int64, gradients: Float32) -> float:
    with table.register():
        table.group.barrier()
        began = time.thread_time()
        _, batch = table.lookup_with_ids(ids)
        table.update(batch, gradients)
        return time.thread_time() - began


if __name__ == "__main__":
    main()
