"""`model.fit` and `model.train_on_batch` of models with tables in a store."""

import inspect
import uuid
from collections.abc import Mapping

import keras
import numpy as np

from elastable.callbacks.freezing import Freezing
from elastable.embedding_store.contract.malformed import Document
from elastable.embedding_store.errors import Unsupported
from elastable.in_process.fit_data import FitArguments, fit_data
from elastable.in_process.fitting import fit
from elastable.in_process.in_process_stores import parts_for_fit, placed_in_stores
from elastable.master.api import JobSpec, Push, SyncPushId
from elastable.master.commits.accumulate import add_metrics
from elastable.master.commits.committer import Committer
from elastable.master.model.keras_optimizer import accumulation_of
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.push_check import Expected, check_finite
from elastable.master.tasks.progress import Progress
from elastable.worker.keras.same_optimizer import require_same_optimizer
from elastable.worker.keras.seeds import FitSeeds, global_seed
from elastable.worker.keras.structures import TensorBatch
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.stream_reader import is_stream
from elastable.worker.step.forward import batch_spec
from elastable.worker.step.id_set import make_id_sets
from elastable.worker.step.steps import make_plan, make_train_step
from elastable.worker.user_model.build import as_tensors, build_model

_DEADLINE_S = 30.0
_KEPT = "_elastable_batch_trainers"


def train_batch(model: keras.Model, reader: Reader) -> dict[str, float]:
    """Trains one batch; metrics by name.

    The tables are as `model.fit` makes them, and go on from call to call.

    Args:
        model: A compiled model.

    Raises:
        ElastableError: data or a model that cannot be used.
        NotFinite: a gradient with NaN or Inf; nothing has been changed.
    """
    batch = as_tensors(reader.take(np.arange(len(reader), dtype=np.int64)), "train_on_batch", model)
    kept: dict[str, _BatchTrainer] | None = getattr(model, _KEPT, None)
    if kept is None:
        kept = {}
        object.__setattr__(model, _KEPT, kept)  # past Keras' tracking: it lives as long as the model does
    form = repr(batch_spec(batch))
    if form not in kept or not kept[form].is_current():
        kept[form] = _BatchTrainer(model, batch)
    return kept[form].train(batch, len(reader))


class _BatchTrainer:
    """Trains batches of one form, while the model stays compiled as it is and reads from the same store."""

    def __init__(self, model: keras.Model, sample: TensorBatch) -> None:
        if accumulation_of(model.optimizer):
            raise Unsupported(
                f"model {model.name!r}: train_on_batch with gradient_accumulation_steps="
                f"{accumulation_of(model.optimizer)}, where an update has batches of several calls; leave it out, or "
                "use model.fit"
            )
        self._model, self._compiled = model, (model.optimizer, model._compile_loss)
        build_model(model, sample)
        spec, seed = batch_spec(sample, model), global_seed()
        parts = parts_for_fit(model, spec, FitSeeds(seed, seed, keras=True), None)
        self._planned = parts.planned
        self._store, self._specs = placed_in_stores(parts), parts.tables
        self._trained, self._dense = parts.trained_layers(), parts.dense()
        self._form = repr(spec)
        self._freezing = Freezing(model, self._dense)
        self._freezing.begin()
        self._book = ModelMetrics(model)
        self._expected = Expected(
            self._dense.variables, self._dense.states, self._book.specs, self._specs, self._dense.may_overflow
        )
        self._committer = Committer(self._store, self._dense, JobSpec(job=uuid.uuid4().hex[:12]), _DEADLINE_S)
        self._plan = make_plan(model, spec, training=True)
        self._step = make_train_step(
            model, spec, self._plan, lambda table, ids: self._store.lookup({table: ids})[table], None, own=parts.steps
        )

    def is_current(self) -> bool:
        """Whether the model is still compiled and attached as it was, and nothing else has trained its tables since."""
        same = all(
            layer.source is self._store and layer.goes_on_with(optimizer, self._specs[layer.table_name])
            for layer, optimizer in self._trained
        )
        return same and (self._model.optimizer, self._model._compile_loss) == self._compiled

    def train(self, batch: TensorBatch, records: int) -> dict[str, float]:
        """One step; metrics by name."""
        require_same_optimizer(self._model, self._planned)
        self._model.make_train_function()
        self._freezing.look(f"train_on_batch of {records} x {self._form}")
        ids = make_id_sets(self._plan.tables, self._plan.ids(batch), self._specs)
        version = self._store.version()
        snapshot = self._dense.snapshot(version)
        self._step.hold(snapshot.trainable)
        rows = self._store.lookup(ids.unique) if ids.unique else {}
        result = self._step(batch, rows, ids, 0)
        push = Push(
            SyncPushId(version, 0), records, result.dense, result.slices, result.states, result.metrics,
            parts=result.parts,
        )  # fmt: skip
        try:
            check_finite(push, self._expected)
        except BaseException:
            self._dense.take_states(snapshot.states)  # the step has moved the states of the model itself
            raise
        self._committer.commit(version + 1, [push], lambda made: Progress())
        total = add_metrics((), [result.metrics])
        for variable, value in zip(self._model.metrics_variables, total, strict=True):
            variable.assign(value.astype(variable.dtype))
        return self._book.results(total)


def model_fit(model: keras.Model, *args: object, **kwargs: object) -> keras.callbacks.History:
    """`model.fit` as a job in this process: `et.fit`, with what Keras means where that is another thing.

    Without `y` a tuple or a dict as `x` is features. Datasets come in their own order and their own batches. A table
    with `input_dim` has Keras' numbers in rows that a batch does not touch, too (`lazy=False`).

    Returns:
        `keras.callbacks.History`.

    Raises:
        ElastableError: what cannot be used, by name.
    """
    given: Document = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs).arguments
    x = given.get("x")
    if is_stream(x):
        given["batch_size"] = None
    elif given.get("y") is None and not isinstance(x, Reader) and isinstance(x, tuple | Mapping):
        given["x"] = (x, None, given.pop("sample_weight", None))
    if isinstance(given.get("validation_data"), Mapping):
        given["validation_data"] = (given["validation_data"],)
    given.pop("self")
    return fit(model, **given, lazy=None)


def model_train_on_batch(
    model: keras.Model,
    x: object,
    y: object = None,
    sample_weight: object = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = False,
) -> float | list[float] | dict[str, float]:
    """`model.train_on_batch`: one step of the optimizer, for variables and tables; arguments as in Keras.

    Returns:
        Loss and metrics as Keras gives them: a number, a list of them, or with `return_dict` a dict.

    Raises:
        ElastableError: what cannot be used, by name.
    """
    if y is None and isinstance(x, tuple | Mapping):
        x, sample_weight = (x, None, sample_weight), None
    reader = fit_data(FitArguments(x=x, y=y, sample_weight=sample_weight, class_weight=class_weight)).train
    logs = train_batch(model, reader)
    return logs if return_dict else model._flatten_metrics_in_order(logs)
