"""A trained model, of a checkpoint or loaded by its model file, for evaluation, prediction and export."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from elastable.assembly import Assembly
from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.api import Tensor
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.commits.accumulate import add_metrics
from elastable.master.model.dense import dense_part
from elastable.master.model.model_metrics import ModelMetrics
from elastable.models.configuration import config_of, refuse_other_words
from elastable.worker.keras.structures import BatchSpec, TensorBatch
from elastable.worker.layers.model_tables import store_layers, tables_given
from elastable.worker.readers.batch.reader import Reader, source_of
from elastable.worker.rows.saved_rows import leaving_rows_out
from elastable.worker.step.forward import batch_spec
from elastable.worker.step.id_set import make_id_sets
from elastable.worker.step.step_plan import plan_step
from elastable.worker.step.steps import make_evaluate_step, make_plan
from elastable.worker.user_model.build import as_tensors, for_model, make_model, needs_sample, sample_batch
from elastable.worker.user_model.model_file import ModelFile, load_model_file

_log = logging.getLogger(__name__)

_BATCH = 256


@dataclass(frozen=True)
class TrainedModel:
    """A model with the dense variables and tables of a checkpoint, or with those that model() gives.

    Attributes:
        checkpoint: None: there is none.
        model: Attached to `store`.
        store: Holds its tables.
        reader: The records of the split that was asked for; None: of none.
    """

    file: ModelFile
    checkpoint: Checkpoint | None
    model: keras.Model
    store: EmbeddingStore
    reader: Reader | None

    def records(self) -> Reader:
        """The records of the split that was asked for."""
        assert self.reader is not None
        return self.reader

    def origin(self) -> dict[str, object]:
        """Where its rows are from, for the output of a command."""
        saved = self.checkpoint
        return {
            "checkpoint": None if saved is None else redacted(saved.address),
            "version": None if saved is None else saved.version,
        }


def open_trained(
    model_file: Path, checkpoint: str | Path | None, split: str | None = None, *, labels: bool = False
) -> TrainedModel:
    """Loads a model file, and fills its model from a checkpoint.

    Args:
        model_file: Its `data` is called for `split` alone; where no split is asked for, only for a model that
            Keras has not built, or with its own `train_step`.
        checkpoint: As of `open_checkpoint`; None: the model has the rows and weights that model() gives it.
        split: Whose records are read; None: none.
        labels: Whether they are read with their labels, and the model is checked on them.

    Raises:
        CheckpointError, ModelError: either cannot be used, or they do not fit.
        BadInput: the model file has no such split; or there is no checkpoint, and model() gives no rows.
    """
    file = load_model_file(model_file)
    saved = None if checkpoint is None else open_checkpoint(checkpoint)
    reader = None if split is None else file.reader(split)
    if split is not None and reader is None:
        raise BadInput(f"{file.path}: data({split!r}) returned None; there is no such split")
    job: DocumentFields = {"seed": 0, "offload_above": 0} if saved is None else saved.job

    def records() -> Reader:
        some = reader or file.reader("train") or file.reader("validation")
        if some is None:
            raise BadInput(f"{file.path}: data() returned None for every split; the model cannot be built")
        return some

    with leaving_rows_out() if saved is not None else nullcontext(set[str]()) as left_out:
        numbers = int(job["seed"]), int(job["offload_above"]), job.get("on_worker", ())
        model = make_model(file.model, records() if labels else records, *numbers)
    reader = None if reader is None else for_model(reader, model)
    spec = None
    if needs_sample(model):
        spec = batch_spec(sample_batch(for_model(records(), model), model), model)
    store = MemoryStore()
    if saved is None:
        _take_given(file, model, spec, store)
    else:
        if unused := left_out.union(tables_given(store_layers(model))):
            _log.warning(
                "the rows that model() gives (%s) are left out: those of %s, version %d, are used",
                ", ".join(sorted(unused)),
                redacted(saved.address),
                saved.version,
            )
        refuse_other_words(str(job.get("model_config") or ""), config_of(model))
        restore_tables(saved, store)
        dense_part(model, None if spec is None else plan_step(model, spec)).restore(saved.dense())
        for layer in store_layers(model):
            layer.attach(store, int(job["seed"]))
    return TrainedModel(file, saved, model, store, reader)


def _take_given(file: ModelFile, model: keras.Model, spec: BatchSpec | None, store: EmbeddingStore) -> None:
    """Puts the rows that model() gives into the store, if it has tables. Raises `BadInput` where it gives none."""
    layers = store_layers(model)
    if not layers:
        return
    if not tables_given(layers):
        raise BadInput(
            f"{file.path}: model() returns a model without rows (it loads none, and sets none), and no checkpoint is "
            "named: write --checkpoint DIR, or load the trained model in model()"
        )
    parts = Assembly(model, spec, 0)
    parts.find_tables()
    parts.fill(store, 0)


def evaluated(trained: TrainedModel, batch_size: int | None = None) -> dict[str, float]:
    """Loss and metrics on the split that was asked for, by the very steps and sums of the job's own evaluation.

    Args:
        trained: From `open_trained` with labels.
        batch_size: Records at a time; None: the job's micro-batches, for the job's numbers.
    """
    reader = trained.records()
    job: DocumentFields = {"micro_batch_size": _BATCH} if trained.checkpoint is None else trained.checkpoint.job
    model, store = trained.model, trained.store
    spec = batch_spec(sample_batch(reader, model), model)
    plan = make_plan(model, spec, training=False)
    step = make_evaluate_step(model, spec, plan, lambda table, ids: store.lookup({table: ids})[table])
    book = ModelMetrics(model)
    total: tuple[Tensor, ...] = ()
    for batch in batches(model, reader, batch_size or int(job["micro_batch_size"])):
        ids = make_id_sets(plan.tables, plan.ids(batch), store.specs())
        total = add_metrics(total, [step(batch, store.lookup(ids.unique), ids)])
    return book.results(total)


def batches(model: keras.Model, reader: Reader, size: int) -> Iterator[TensorBatch]:
    """All records of a reader, in order, as batches of tensors that the model takes."""
    for start in range(0, len(reader), size):
        rows = np.arange(start, min(len(reader), start + size), dtype=np.int64)
        yield as_tensors(reader.take(rows), source_of(reader), model, rows)
