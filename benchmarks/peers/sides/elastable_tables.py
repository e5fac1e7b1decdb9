"""Elastable's tables in memory, through the public API."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import cycle

import numpy as np

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from elastable.embedding_store import EmbeddingTable, IndexedSlices, MemoryStore, OptimizerSpec, RowBlock, TableSpec
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.process.heap import keep_freed_memory

_OUTPUTS = 4  # in rotation, so that none is still in a cache
_FILLED_AT_ONCE = 1 << 16
_OPTIMIZERS = {
    "update": "rowwise_adagrad",
    "lookup and update": "rowwise_adagrad",
    "adagrad": "adagrad",
    "adam": "adam",
}


def prepare(race: str, settings: Mapping[str, object]) -> Turn:
    """The turn of a race.

    `lookup` and `dynamic`: rows of ids. `bags`: sums of bags. `update`: grouping
    and row-wise Adagrad. `lookup and update`: both, as a training step does.
    `adagrad`, `adam`: updates of ids that stand once each.
    """
    keep_freed_memory()  # as every process of the `elastable` command does
    name = f"elastable {version('elastable')}"
    if race == "dynamic":
        present, batches = workloads.dynamic_ids()
        table = _table(race, None, present)
    else:
        make = {"bags": workloads.bags, "lookup": workloads.uniform, "adagrad": workloads.unique}
        make |= {"adam": workloads.unique, "update": workloads.zipf, "lookup and update": workloads.zipf}
        batches = make[race]()
        table = _table(race, workloads.ROWS, np.arange(workloads.ROWS))
    turns = cycle(batches)
    shape = (len(batches[0]), workloads.DIM)
    outputs = cycle([np.empty(shape, np.float32) for _ in range(_OUTPUTS)])
    if race in ("lookup", "dynamic", "bags"):
        combiner = "sum" if race == "bags" else None
        return Turn(name, lambda: table.lookup(next(turns), next(outputs), combiner=combiner), batches[0].size)
    gradients = np.random.default_rng(2).standard_normal(shape, np.float32)
    return Turn(name, _training(race, table, turns, outputs, gradients), batches[0].size)


def _training(
    race: str, table: EmbeddingTable, turns: Iterator[Int64], outputs: Iterator[Float32], gradients: Float32
) -> Callable[[], None]:
    looks_up = race == "lookup and update"

    def train() -> None:
        ids = next(turns)
        if looks_up:
            table.lookup(ids, next(outputs))
        table.update(None, IndexedSlices(gradients, ids))

    return train


def _table(race: str, vocabulary_size: int | None, ids: workloads.Int64) -> EmbeddingTable:
    """A table all of whose rows hold values of their own."""
    optimizer = OptimizerSpec.of(_OPTIMIZERS.get(race, "sgd"), learning_rate=0.01)
    store = MemoryStore(workloads.THREADS)
    spec = TableSpec("t", workloads.DIM, vocabulary_size, optimizer=optimizer)
    store.create_table(spec)
    slots = row_optimizer(optimizer).initial_slots(workloads.DIM)
    random = np.random.default_rng(1)
    for start in range(0, len(ids), _FILLED_AT_ONCE):
        some = ids[start : start + _FILLED_AT_ONCE]
        rows = random.standard_normal((len(some), workloads.DIM), np.float32)
        store.put("t", [RowBlock(some, rows, np.tile(slots, (len(some), 1)))])
    return store.table("t")
