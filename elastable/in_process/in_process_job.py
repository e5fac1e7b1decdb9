"""A whole job in the current process: its master in the caller's thread, its worker in another thread."""

import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import keras
from rich.console import Console

from elastable.callbacks.callback_list import JobCallbacks
from elastable.callbacks.final_weights import BestVersions, finalize_averages
from elastable.callbacks.freezing import Freezing
from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, ElastableError, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.shards.server_contract import ShardStore
from elastable.in_process.fit_data import FitData
from elastable.in_process.fit_seeds import FitSeeds
from elastable.in_process.in_process_stores import FitTables, StoreGiven
from elastable.jobs.job_hooks import JobHooks
from elastable.master.api import JobSpec, TaskKind, WorkerIdentity
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.model.dense import DenseModel, dense_part
from elastable.master.model.keras_optimizer import accumulated_by
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.models.tables_in_store import note_trained
from elastable.output.progress_bars import JobProgress
from elastable.process.repeating import repeating
from elastable.worker.keras.same_optimizer import kept_traces, require_same_optimizer
from elastable.worker.keras.seeds import layers_of, same_keras_state
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.runtime.loop import Worker
from elastable.worker.step.batch_checks import batch_spec
from elastable.worker.step.traced.step_plan import StepPlan, plan_step, planned_optimizers
from elastable.worker.user_model.build import build_model, for_model, sample_batch, warn_of_other_numbers
from elastable.worker.user_model.offload import OffloadedEmbedding, offload_built

_SHOW_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How a model is trained in this process; `et.fit` says what each means.

    Attributes:
        lazy: As of `discover_tables`.
        verbose: 0: nothing is shown; 1: how far the job is, and a line for every epoch; 2: these lines alone.

    Raises:
        BadInput: a value that cannot be, by name.
    """

    epochs: int
    initial_epoch: int
    callbacks: Sequence[keras.callbacks.Callback]
    verbose: int
    shuffle: bool
    validation_freq: int | tuple[int, ...]
    seeds: FitSeeds
    grads_to_wait: int | None
    average: str
    evaluate_every: int
    store: StoreGiven
    locations: LocationSettings | None
    offload_embeddings_above: int
    lazy: bool | None
    not_finite: str

    def __post_init__(self) -> None:
        if not 0 <= self.initial_epoch < self.epochs:
            raise BadInput(
                f"initial_epoch={self.initial_epoch}, epochs={self.epochs}: need 0 <= initial_epoch < epochs; epochs "
                "is the epoch to end at"
            )
        if self.evaluate_every < 0:
            raise BadInput(f"evaluate_every={self.evaluate_every}: need a number of versions, or 0")


def run_here(model: keras.Model, data: FitData, settings: FitSettings) -> keras.callbacks.History:
    """Trains the model; returns Keras' `History`."""
    if settings.evaluate_every and data.validation is None:
        raise BadInput(f"evaluate_every={settings.evaluate_every}: need validation_data to evaluate on")
    train = for_model(data.train, model)
    sample = sample_batch(train, model)
    form = ("built", repr(batch_spec(sample)))
    if form not in kept_traces(model):
        build_model(model, sample)
    moved = offload_built(model, settings.offload_embeddings_above)
    steps = plan_step(model, batch_spec(sample))
    job = _job(model, data, settings, steps)
    warn_of_other_numbers(model, job)
    schedule = Schedule(job)
    # A job counts its versions from epoch 0, also where the rows are older.
    version = schedule.first_version(settings.initial_epoch)
    start = Progress(version, evaluated=True, records=schedule.records_before(version)) if version else Progress()
    tables = FitTables(
        model, seeds=settings.seeds, lazy=settings.lazy, store=settings.store, locations=settings.locations,
        version=version, moved=moved, steps=steps,
    )  # fmt: skip
    if steps is not None and tables.on_worker:
        steps = plan_step(model, batch_spec(sample))  # they are variables now
    kept = kept_traces(model) if steps is None else {}
    dense: DenseModel = kept["dense"] if "dense" in kept else dense_part(model, steps)
    dense.begin()
    metrics: ModelMetrics = kept["metrics"] if "metrics" in kept else ModelMetrics(model)
    # The worker shares the model with the master: it cannot hold another version's variables meanwhile.
    options = MasterOptions(
        evaluate_every=settings.evaluate_every, concurrent_evaluation=False, validation_freq=settings.validation_freq,
        uneven=data.train.batches is not None,
    )  # fmt: skip
    master = Master(job, tables.store, dense, metrics, start=start, options=options)
    readers: dict[TaskKind, Reader] = {TaskKind.TRAIN: train}
    if data.validation is not None:
        readers[TaskKind.EVALUATE] = data.validation
    model.make_train_function()  # whose steps are traced: with the one of before until somebody makes it anew
    computer = MicroBatchComputer(
        model, job, readers, sample, tables.store, tables.specs, keras_draws=settings.seeds.keras
    )
    if steps is None:
        kept_traces(model).update({form: True, "dense": dense, "metrics": metrics})
    refuse_backup_of_slots(settings.callbacks, model, tables.specs)
    with ExitStack() as held:
        best = held.enter_context(closing(BestVersions(settings.callbacks, tables.store, dense, job, master.progress)))
        for layer in store_layers(model):
            held.enter_context(layer.in_fit(model))
        return _run(model, master, computer, schedule, tables, dense, settings, best)


def _job(model: keras.Model, data: FitData, settings: FitSettings, steps: StepPlan | None) -> JobSpec:
    batches = -(-len(data.train) // data.batch_size)
    require_same_optimizer(model, planned_optimizers(steps))
    together, average = accumulated_by(model.optimizer, batches, settings.grads_to_wait, settings.average)
    if data.steps_per_epoch and settings.grads_to_wait is None and together > 1:
        raise Unsupported(
            f"steps_per_epoch={data.steps_per_epoch} with gradient_accumulation_steps={together}: an epoch could end "
            "within a step; leave one of them out"
        )
    return JobSpec(
        job=uuid.uuid4().hex[:12],
        micro_batch_size=data.batch_size,
        grads_to_wait=together,
        average=average,
        epochs=settings.epochs,
        seed=settings.seeds.order,
        train_records=len(data.train),
        validation_records=0 if data.validation is None else len(data.validation),
        shuffle=settings.shuffle,
        not_finite=settings.not_finite,
        steps_per_epoch=data.steps_per_epoch,
        initial_epoch=settings.initial_epoch,
        evaluation_batch_size=data.validation_batch_size,
    )


def _run(
    model: keras.Model,
    master: Master,
    computer: MicroBatchComputer,
    schedule: Schedule,
    tables: FitTables,
    dense: DenseModel,
    settings: FitSettings,
    best: BestVersions,
) -> keras.callbacks.History:
    """Callbacks, progress and the job itself, from its first version to its last."""
    epochs = settings.epochs
    batch, even = schedule.job.micro_batch_size, schedule.job.train_records % schedule.job.micro_batch_size == 0
    freezing = Freezing(model, dense, f"fit of {batch} x {computer.spec!r}, {even=}")
    joined = JobCallbacks(
        settings.callbacks, model, epochs, schedule.steps_per_epoch, freezing, best, in_job=False,
        verbose=settings.verbose,
    )  # fmt: skip
    # In lines, where a terminal is not asked to show how far the job is.
    console = Console(quiet=settings.verbose == 0, force_terminal=None if settings.verbose == 1 else False)
    progress = JobProgress(console, schedule.records_before(schedule.versions_total))
    evaluations: list[dict[str, float]] = []

    def evaluated(version: int, logs: Mapping[str, float]) -> None:
        evaluations.append({"version": version, **logs})
        progress.evaluation(version, logs)

    def epoch_ended(epoch: int, logs: Mapping[str, float]) -> None:
        dense.rewind()  # what the evaluation changed in the states of the model that both share
        progress.epoch(epoch, epochs, logs)

    hooks = JobHooks(
        joined,
        schedule,
        master.stop,
        on_epoch=epoch_ended,
        evaluated=evaluated,
        version=schedule.first_version(schedule.job.initial_epoch),
        shares_model=True,
    )
    joined.begin()
    note_trained(model, tables.optimizers)  # a callback may have loaded weights
    try:
        with ExitStack() as held:
            held.enter_context(progress)
            held.enter_context(_worker_beside(master, computer, tables.store, joined.sees_versions))
            if settings.verbose == 1:
                held.enter_context(repeating(lambda: progress.show(master.status()), _SHOW_EVERY_S, "elastable-watch"))
            master.run(hooks)
    except BaseException:
        dense.rewind()
        raise
    if master.stop_reason is not None:
        # It may find the worker within a micro-batch, which moves the states of the model that both share.
        dense.rewind()
    finalize_averages(dense, tables.store, tables.specs)
    joined.end(hooks.logs)
    joined.history.evaluations = sorted(evaluations, key=lambda entry: entry["version"])
    return joined.history


@contextmanager
def _worker_beside(
    master: Master, computer: MicroBatchComputer, store: EmbeddingStore, rows_change: bool
) -> Iterator[None]:
    """A worker in a thread; callbacks stay in the caller's."""
    identity = WorkerIdentity(uuid.uuid4().hex, socket.gethostname(), os.getpid())
    servers = store if isinstance(store, ShardStore) else None
    session = master.join(identity)
    worker = Worker(master, computer, store, session, identity, rows_to=servers, rows_change=rows_change)

    def work() -> None:
        try:
            worker.run()
        except ElastableError:
            # The worker has reported it to the master, whose run() raises it in the caller's thread.
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, run() must raise it and not wait
            master.report_failure(identity.incarnation, error, fatal=True)

    thread = threading.Thread(target=same_keras_state(work), name="elastable-worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(timeout=30.0)


# `keras.callbacks.BackupAndRestore` in `et.fit`: where a fit that was interrupted goes on


def backed_up_epoch(callbacks: Sequence[keras.callbacks.Callback], initial_epoch: int) -> int:
    """The epoch that Keras' `fit` would begin at: that of a backup, where there is one.

    Raises:
        BadInput: a backup that cannot be read.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            file = Path(callback._training_metadata_path)
            if not file.exists():
                continue
            try:
                epoch = json.loads(file.read_text())["epoch"]
                if type(epoch) is not int or epoch < 0:
                    raise ValueError(f"epoch {epoch!r}")
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise BadInput(
                    f"callback BackupAndRestore: {file} is no backup ({error}); delete its folder to begin anew"
                ) from error
            initial_epoch = epoch or initial_epoch
    return initial_epoch


def refuse_backup_of_slots(
    callbacks: Sequence[keras.callbacks.Callback], model: keras.Model, tables: dict[str, TableSpec]
) -> None:
    """Raises `Unsupported` where a backup would lack the slots of a table: the file holds a plain Keras embedding."""
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            continue
        for layer in layers_of(model):
            spec = tables.get(layer.name) if isinstance(layer, OffloadedEmbedding) else None
            if spec is None or not row_optimizer(spec.optimizer).slots:
                continue
            raise Unsupported(
                f"callback BackupAndRestore: embedding layer {layer.name!r} is offloaded, and Keras' file has no place "
                "for the slots of its optimizer; use et.Embedding, or a job with --checkpoint-dir and --resume"
            )
