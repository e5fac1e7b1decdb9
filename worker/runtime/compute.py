"""Computes one micro-batch, from its task to its gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, ModelError, NotFinite, Unavailable
from elastable.embedding_store.support.retry import retry
from elastable.master.api import BadEvent, DenseSnapshot, JobSpec, Span, Task, TaskKind, Tensor
from elastable.master.backend.contract import backend, take_statistics
from elastable.master.tasks.record_order import RecordOrder, record_order
from elastable.worker.keras.same_optimizer import kept_traces
from elastable.worker.keras.structures import BatchSpec, TensorBatch
from elastable.worker.readers.batch.reader import Batch, Reader, source_of
from elastable.worker.readers.streams.event_reader import EventReader
from elastable.worker.step.array_step import ArrayIdPlan
from elastable.worker.step.forward import batch_spec, not_finite_columns, records_in, require_like
from elastable.worker.step.id_plan import IdPlan
from elastable.worker.step.id_set import IdSets, make_id_sets
from elastable.worker.step.step_plan import StepPlan, plan_step
from elastable.worker.step.steps import make_evaluate_step, make_plan, make_train_step
from elastable.worker.step.trainable import StepResult, trained_and_others
from elastable.worker.user_model.build import as_tensors, for_model, sample_batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task whose records are read and ids are known: ready for any version.

    Attributes:
        batch: (x, ...) as tensors; of 0 records, none.
        bad_events: Of a stream: those of the task that could not be read.
    """

    task: Task
    batch: TensorBatch
    ids: IdSets
    records: int
    bad_events: tuple[BadEvent, ...] = ()


def require_same_records(job: JobSpec, readers: Mapping[TaskKind, Reader]) -> None:
    """Refuses splits that are not the master's, as far as lengths and digests tell.

    Raises:
        BadInput: names the split and both lengths.
    """
    for kind, split, expected in (
        (TaskKind.TRAIN, "train", job.train_records),
        (TaskKind.EVALUATE, "validation", job.validation_records),
    ):
        if kind is TaskKind.TRAIN and job.stream and readers[kind].streams:
            continue
        found = len(readers[kind]) if kind in readers else 0
        if found != expected:
            raise BadInput(
                f"data({split!r}) holds {found} records here and {expected} at the master; "
                "every process must see the same data"
            )
    if (parts := readers[TaskKind.TRAIN].parts) != job.parts:
        raise BadInput(f"data('train') has parts of {list(parts)} records here and {list(job.parts)} at the master")
    if readers[TaskKind.TRAIN].digest() != job.records_digest:
        raise BadInput(
            "data('train') holds other records here than at the master, or in another order: seed what is random in "
            "it, and give et.RayDataReader the dataset before materialize()"
        )


class MicroBatchComputer:
    """Reads, plans and computes micro-batches of one job with one model.

    `prepare` may run in another thread than `train` and `evaluate`.

    Attributes:
        spec: TypeSpecs of training batches.

    Args:
        model: A built model.
        readers: The splits, as long as the job says; they are read as the model's inputs want them.
        sample: A batch as the model takes it, for its shapes.
        source: Source of rows for calls whose ids cannot be planned.
        deadline_s: Seconds to retry a lookup of ids that could not be planned.
        keras_draws: Whether random layers continue from their current state, as in `model.fit`: for a single process
            that computes all micro-batches in order. False: they depend on the job's seed and the micro-batch.
        shares_model: Whether the model is the master's own, whose weights are those of its version, and stay so: what
            a micro-batch changes of them is put back.
    """

    def __init__(
        self,
        model: keras.Model,
        job: JobSpec,
        readers: Mapping[TaskKind, Reader],
        sample: TensorBatch,
        source: RowSource,
        specs: Mapping[str, TableSpec],
        deadline_s: float = 30.0,
        keras_draws: bool = False,
        shares_model: bool = False,
    ) -> None:
        self._model = model
        self._job = job
        self._readers: dict[TaskKind, Reader] = {}
        for kind, reader in readers.items():
            self._readers[kind] = for_model(reader, model)
        self._specs = specs
        self.spec = batch_spec(sample, model)
        self._likes = {TaskKind.TRAIN: self.spec}
        if TaskKind.EVALUATE in readers:
            validation = sample_batch(self._readers[TaskKind.EVALUATE], model)
            require_like(self.spec[:2], validation[:2], int(records_in(validation)), "the validation data")
            # Training and validation data may have weights independently, as in Keras.
            self._likes[TaskKind.EVALUATE] = (*self.spec[:2], *batch_spec(validation, model)[2:])
        steps = plan_step(model, self.spec)
        several = job.micro_batches_per_version > 1 and job.average != "batches"
        seed, average = None if keras_draws else job.seed, job.average if several else None
        evaluated = job.evaluation_batch_size or job.micro_batch_size
        sizes = {
            TaskKind.TRAIN: (job.micro_batch_size, job.even_batches),
            TaskKind.EVALUATE: (evaluated, job.validation_records % evaluated == 0),
        }
        self._traced = TracedSteps(model, self._likes, sizes, seed, average, steps)
        self._traced.rows.source, self._traced.rows.deadline_s = source, deadline_s
        self._shares_model = shares_model
        self._held: DenseSnapshot | None = None

    def prepare(self, task: Task) -> Prepared:
        """Reads the task's records and computes their ids."""
        reader, records = self._part(task), task.stop - task.start
        rows: Int64 | None = None
        bad: tuple[BadEvent, ...] = ()
        if task.spans:
            source = f"events from {task.spans[0].partition} {task.spans[0].start} on"
            taken, bad = self._read(task.spans)
            if taken is None:
                return Prepared(task, (), IdSets({}, ()), 0, bad)
        elif reader.batches is None:
            source, rows = source_of(reader), self._order(task).take(task.start, task.stop)
            taken = reader.take(rows)
        else:
            number = task.start // self._job.micro_batch_size
            source = f"batch {number} of pass {task.epoch - self._job.parts_before}, counted from 0,"
            taken = reader.batch(number)
        batch = as_tensors(taken, source, self._model, rows)
        if rows is None:
            records = int(records_in(batch))
        require_like(self._likes[task.kind], batch, records, source)
        plan = self._traced.plans[task.kind]
        ids = make_id_sets(plan.tables, plan.ids(batch, rows), self._specs)
        return Prepared(task, batch, ids, records, bad)

    def _read(self, spans: Sequence[Span]) -> tuple[Batch | None, tuple[BadEvent, ...]]:
        """Events of a stream, which may be away for a while."""
        reader = self._readers[TaskKind.TRAIN]
        assert isinstance(reader, EventReader), "a task of a stream is for a reader of one"
        return retry(lambda: reader.read(spans), "reading events", self._traced.rows.deadline_s, on=(Unavailable,))

    def _part(self, task: Task) -> Reader:
        """The records that the task's positions count."""
        reader = self._readers[task.kind]
        if task.kind is TaskKind.EVALUATE:
            return reader.of_evaluation(task.version)
        return reader.of_pass(task.epoch - self._job.parts_before)

    def _order(self, task: Task) -> RecordOrder:
        """The order in which they are computed."""
        part, ordered = self._part(task), self._readers[task.kind].in_order
        shuffled = self._job.shuffle and task.kind is TaskKind.TRAIN and not (ordered or part.in_order)
        return record_order(len(part), task.epoch, self._job.seed, shuffled, part.shuffle_block)

    def hold(self, snapshot: DenseSnapshot) -> None:
        """Uses this version's dense part from now on, and trains what that version trains."""
        if not self._shares_model:
            self._traced.mirror.assign(snapshot)
            if self._held is None:  # before its steps are traced
                take_statistics(self._model._flatten_layers())
        self._held = snapshot
        self._traced.steps[TaskKind.TRAIN].hold(snapshot.trainable)

    def train(self, prepared: Prepared, bets: Mapping[str, Float32]) -> StepResult:
        """Gradients, states and metric state of a micro-batch."""
        number = prepared.task.micro_batch
        try:
            result: StepResult = self._traced.steps[TaskKind.TRAIN](prepared.batch, bets, prepared.ids, number)
        finally:
            self._put_back()
        if not math.isfinite(result.loss):
            self._blame_data(prepared, result.loss)
        return result

    def _blame_data(self, prepared: Prepared, loss: float) -> None:
        """Names the columns that caused a loss of NaN or Inf; if there are none, the master names the gradient."""
        columns = not_finite_columns(prepared.batch)
        if not columns:
            return
        task = prepared.task
        own = self._readers[task.kind].batches is not None or bool(task.spans)
        rows = range(prepared.records) if own else self._order(task).take(task.start, task.stop)
        message = "; ".join(
            f"{name} holds NaN or Inf in {len(found)} of its {prepared.records} records, such as "
            f"record {rows[found[0]]}"
            for name, found in columns.items()
        )
        message = f"the loss of micro-batch {task.micro_batch} is {loss}: {message}"
        if self._job.not_finite == "refuse":
            raise NotFinite(
                f"{message}. Drop or fill these values; or leave such micro-batches out with not_finite='skip' "
                "(--not-finite skip)"
            )
        _log.warning("%s; it is left out (not_finite='skip')", message)

    def evaluate(self, prepared: Prepared, bets: Mapping[str, Float32]) -> tuple[Tensor, ...]:
        """Metric state of a micro-batch."""
        try:
            state: tuple[Tensor, ...] = self._traced.steps[TaskKind.EVALUATE](prepared.batch, bets, prepared.ids)
        finally:
            self._put_back()
        return state

    def _put_back(self) -> None:
        """A micro-batch is over: the master reads the weights of a model that it shares whenever it likes."""
        if self._shares_model and self._held is not None and self._held.states:
            self._traced.mirror.assign(self._held, states_only=True)


# What is traced of a model


class TracedSteps:
    """The steps of a model and their id plans, each traced in its first call.

    As in Keras, `fit` goes on with a trace of before (`kept_traces`) until `compile` or
    `make_train_function(force=True)`, and traces anew for batches of another size or structure; training and evaluation
    each by itself.

    Attributes:
        mirror: Writes snapshots into the variables that the steps read.
        rows: Where ids are looked up that could not be planned; set by the job that uses the steps now.
        plans, steps: Of each kind of task.

    Args:
        likes: TypeSpecs of the batches of each kind of task.
        sizes: How the records of each kind are cut into batches: their number, and whether all have as many.
        seed, average, own: As of `TrainStep`, `steps` as `own`.
    """

    def __init__(
        self,
        model: keras.Model,
        likes: Mapping[TaskKind, BatchSpec],
        sizes: Mapping[TaskKind, object],
        seed: int | None,
        average: str | None,
        own: StepPlan | None,
    ) -> None:
        kept = dict(kept_traces(model)) if own is None else {}
        functions = {TaskKind.TRAIN: model.train_function, TaskKind.EVALUATE: model.test_function}
        forms = {}
        for kind, like in likes.items():
            forms[kind] = (kind, repr(like), sizes[kind], functions[kind], seed, average)
        self.rows: _UnplannedRows = kept.get("rows") or _UnplannedRows()
        self.mirror: DenseMirror = kept.get("mirror") or DenseMirror(
            *trained_and_others(model, own.weights() if own else None)
        )
        self.plans, self.steps = dict[TaskKind, IdPlan | ArrayIdPlan](), dict[TaskKind, Any]()
        for kind, form in forms.items():
            if form in kept:
                self.plans[kind], self.steps[kind] = kept[form]
                continue
            like, training = likes[kind], kind is TaskKind.TRAIN
            plan = self.plans[kind] = make_plan(model, like, training)
            if training:
                self.steps[kind] = make_train_step(model, like, plan, self.rows.look_up, seed, average, own)
            else:
                self.steps[kind] = make_evaluate_step(model, like, plan, self.rows.look_up)
        if own is None:  # asked again: planning may have made Keras' global generator
            now = kept_traces(model)
            now["rows"], now["mirror"] = self.rows, self.mirror
            for kind, form in forms.items():
                now[form] = self.plans[kind], self.steps[kind]


class _UnplannedRows:
    """Looks up ids that could not be planned; `source`, `deadline_s` as of `MicroBatchComputer`."""

    source: RowSource
    deadline_s: float

    def look_up(self, table: str, ids: Int64) -> Float32:
        """Rows float32 `[n, dim]`."""
        return retry(lambda: self.source.lookup({table: ids})[table], "a lookup", self.deadline_s, on=(Unavailable,))


# Copies the dense part of a version into the worker's model


class DenseMirror:
    """Writes snapshots into a model's variables and states.

    Args:
        variables: Variables of the job's optimizer, in model order.
        states: All other weights, in model order.
    """

    def __init__(self, variables: Sequence[keras.Variable], states: Sequence[keras.Variable]) -> None:
        variables = [*variables, *states]
        self._targets = variables
        self._paths = [variable.path for variable in variables]
        self._shapes = [tuple(variable.shape) for variable in variables]

    def assign(self, snapshot: DenseSnapshot, states_only: bool = False) -> None:
        """Writes the snapshot into the model, or its states alone, which a step changes.

        Raises:
            ModelError: the master's model has different variables.
        """
        values = (*snapshot.variables, *snapshot.states)
        theirs = [tuple(value.shape) for value in values]
        if theirs != self._shapes:
            raise ModelError(
                f"the master's model differs from this worker's: its dense variables have shapes {theirs}, "
                f"here {dict(zip(self._paths, self._shapes, strict=True))}; run the same model file everywhere"
            )
        assign = backend().assign
        first = len(snapshot.variables) if states_only else 0
        for target, value in zip(self._targets[first:], values[first:], strict=True):
            assign(target, value)
