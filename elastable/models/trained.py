"""A trained model brought back from a checkpoint, for evaluation, prediction and export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.master.api import Tensor
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.commits.accumulate import add_metrics
from elastable.master.keras.metrics import ModelMetrics
from elastable.master.keras.multi_update import dense_part
from elastable.worker.keras.structures import TensorBatch
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.models.build import as_tensors, for_model, make_model, sample_batch
from elastable.worker.models.model_file import ModelFile, load_model_file
from elastable.worker.readers import Reader
from elastable.worker.step.id_plan import plan_ids
from elastable.worker.step.id_set import make_id_sets
from elastable.worker.step.model_step import EvaluateStep
from elastable.worker.step.tensor_specs import batch_spec
from elastable.worker.step.traced.step_plan import plan_step

__all__ = ["TrainedModel", "batches", "evaluated", "open_trained"]


class TrainedModel:
    """A model whose dense variables and tables are those of a checkpoint."""

    def __init__(self, file: ModelFile, checkpoint: Checkpoint, model: keras.Model, store: EmbeddingStore) -> None:
        self.file = file
        self.checkpoint = checkpoint
        self.model = model
        self.store = store

    def reader(self, split: str) -> Reader:
        """The records of a split.

        Raises:
            BadInput: the model file has no such split.
        """
        reader = self.file.reader(split)
        if reader is None:
            raise BadInput(f"{self.file.path}: data({split!r}) returned None; there is no such split")
        return for_model(reader, self.model)


def open_trained(model_file: Path, checkpoint: str | Path) -> TrainedModel:
    """Loads a model file and fills its model from a checkpoint.

    Raises:
        CheckpointError, ModelError: either cannot be used, or they do not fit.
    """
    file = load_model_file(model_file)
    saved = open_checkpoint(checkpoint)
    reader = file.reader("train") or file.reader("validation")
    if reader is None:
        raise BadInput(f"{file.path}: data() returned None for every split; the model cannot be built")
    job = saved.job
    model, reader = make_model(
        file.model, reader, int(job["seed"]), int(job["offload_above"]), job.get("on_worker", ())
    )
    store = MemoryStore()
    restore_tables(saved, store)
    dense_part(model, plan_step(model, batch_spec(sample_batch(reader)))).restore(saved.dense())
    for layer in store_layers(model):
        layer.attach(store, int(job["seed"]))
    return TrainedModel(file, saved, model, store)


def evaluated(trained: TrainedModel, split: str, batch_size: int | None = None) -> dict[str, float]:
    """Loss and metrics on a split, by the very steps and sums of the job's own evaluation.

    Args:
        trained: From `open_trained`.
        split: "train" or "validation".
        batch_size: Records at a time; None: the job's micro-batches, for the job's numbers.

    Raises:
        BadInput: the model file has no such split.
    """
    reader = trained.reader(split)
    model, store, spec = trained.model, trained.store, batch_spec(sample_batch(reader))
    plan = plan_ids(model, spec, training=False)
    step = EvaluateStep(model, spec, plan, lambda table, ids: store.lookup({table: ids})[table])
    book = ModelMetrics(model)
    total: tuple[Tensor, ...] = ()
    for batch in batches(reader, batch_size or int(trained.checkpoint.job["micro_batch_size"])):
        ids = make_id_sets(plan.tables, plan.ids(batch), store.specs())
        total = add_metrics(total, [step(batch, store.lookup(ids.unique), ids)])
    return book.results(total)


def batches(reader: Reader, size: int) -> Iterator[TensorBatch]:
    """All records of a reader, in order, as batches of tensors."""
    for start in range(0, len(reader), size):
        yield as_tensors(reader.take(np.arange(start, min(len(reader), start + size), dtype=np.int64)))
