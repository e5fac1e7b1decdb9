"""Knowledge graphs whose entities outgrow memory: the same training, with entities and their slots in files.

A worker keeps its shard of the entities in a store in files (`file://`), with a budget of memory of a quarter of the
rows and their slots. Before a step it looks up the rows of the step, trains on those alone, and commits their
gradients; the store applies the optimizer. ComplEx, sampled softmax, Adagrad; one worker. The numbers must be those of
the same run in memory, to the bit.

    python -m benchmarks.graphs.kg_beyond_memory
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, publish
from benchmarks.peers import workloads
from benchmarks.processes import own_memory
from elastable.embedding_store.contract.arrays import Float32, Int32, Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.open_store import open_store
from elastable.replicas.groups.thread_group import alone
from elastable.replicas.knowledge_graphs.graph.batch import StepBatch
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.schemes import StepGradients

_ENTITIES, _RELATIONS, _TRIPLES, _STEPS, _DIM = 500_000, 50, 1_000_000, 300, 128
_TABLE = "entities"
_MIB = 1 << 20


class StoredTrainer(GraphTrainer):
    """A trainer whose entities are rows of a store, by global id; a step holds the rows that it reads, and no others.

    Args:
        store: Gets the table "entities", with the initial values that the run has in memory.
        settings: Of the run, with a loss that needs negatives, a constant learning rate and no spread.
        entities, relations, triples: As of `GraphTrainer`.
    """

    def __init__(
        self, store: EmbeddingStore, settings: TrainSettings, entities: int, relations: int, triples: Int32
    ) -> None:
        super().__init__(alone(), settings, entities, relations, triples)
        self._store, model = store, self.model
        width, optimizer = model.score.entity_width, settings.optimizer_spec
        spec = TableSpec(
            _TABLE, width, entities, initializer=model.score.entities, seed=settings.seed, optimizer=optimizer
        )
        store.create_table(spec)
        model._variables[_TABLE] = np.empty((0, width), np.float32)
        model._slots[_TABLE] = np.empty((0, 0), np.float32)  # they are in the store

    def rows(self, ids: Int64) -> Float32:
        """float32 `[k, entity_width]`: embeddings of entities, by global id."""
        found: Float32 = self._store.lookup({_TABLE: ids})[_TABLE]
        return found

    def _gradients(self, batch: StepBatch, weight: Float32) -> tuple[float, StepGradients]:
        negatives = batch.negatives
        assert negatives is not None
        read = np.unique(np.concatenate([part.reshape(-1) for part in (batch.head, batch.tail, negatives.rows)]))

        def compact(part: Int32) -> Int32:
            return np.searchsorted(read, part).astype(np.int32)

        rows = replace(negatives, rows=compact(negatives.rows))
        asked = replace(batch, head=compact(batch.head), tail=compact(batch.tail), negatives=rows)
        ids = self.sharding.entity_at[self.group.rank, read].astype(np.int64)
        self.model._variables[_TABLE] = self.rows(ids)
        loss, gradients = super()._gradients(asked, weight)
        update = TableUpdate(ids[gradients.rows], np.ascontiguousarray(gradients.entities))
        self._store.commit(Commit(self.step + 1, {_TABLE: update}, 1, {}))
        self.model._variables[_TABLE] = self.model.entities[:0]
        nothing = np.empty(0, np.int64), np.empty((0, gradients.entities.shape[1]), np.float32)
        return loss, StepGradients(*nothing, gradients.relations, gradients.dense)


def main() -> None:
    """Measures, prints and writes `results/kg_beyond_memory.json`."""
    with tempfile.TemporaryDirectory(prefix="kg-beyond-") as home:
        rows = trial(Path(home), _ENTITIES, _RELATIONS, _TRIPLES, _STEPS, _DIM)
    publish("kg_beyond_memory", "Knowledge graphs: entities in files, a quarter of them in memory", rows)


def trial(home: Path, entities: int, relations: int, count: int, steps: int, dim: int) -> list[Row]:
    """Trains in memory and in files. Raises RuntimeError if a loss or a row differs."""
    triples = workloads.triples(entities, relations, count).astype(np.int32)
    settings = TrainSettings(
        model="ComplEx", dim=dim, loss="softmax", negatives=1024, shared=True, batch=1024, learning_rate=0.1
    )
    budget = max(_MIB, 2 * 4 * dim * entities // 4)
    with open_store(f"file://{home / 'rows'}?budget={budget}") as store:
        stored, before = StoredTrainer(store, settings, entities, relations, triples), own_memory()
        losses, seconds = _trained(stored, steps)
        grown = own_memory() - before
        some = np.arange(0, entities, max(1, entities // 20_000), dtype=np.int64)
        found, table = stored.rows(some), stored.model.relations
    plain = GraphTrainer(alone(), settings, entities, relations, triples)
    expected, in_memory = _trained(plain, steps)
    wanted = plain.model.entities[plain.sharding.row_of[some]]
    if losses != expected or not np.array_equal(found, wanted) or not np.array_equal(table, plain.model.relations):
        raise RuntimeError("entities in files were not trained to the numbers of those in memory")
    of = f"{entities:,} entities of {dim} values with Adagrad"
    return [
        Row(f"steps with {of} in files, a quarter in memory", steps / seconds, "steps/s", steps / in_memory,
            in_memory / seconds),
        Row(f"memory that grew in files, {of}, against all rows and slots", grown / _MIB, "MiB",
            2 * 4 * dim * entities / _MIB, grown / (2 * 4 * dim * entities)),
    ]  # fmt: skip


def _trained(trainer: GraphTrainer, steps: int) -> tuple[list[float], float]:
    """The losses of so many steps, and the seconds that they took after the first."""
    losses = [trainer.run_step()[0]]
    began = time.perf_counter()
    losses += [trainer.run_step()[0] for _ in range(steps - 1)]
    return losses, time.perf_counter() - began


if __name__ == "__main__":
    main()
