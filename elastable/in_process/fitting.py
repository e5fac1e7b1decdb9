"""`et.fit`: a whole job in the current process and thread: its master calls its worker."""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import keras
from rich.console import Console

from elastable.assembly import Assembly
from elastable.callbacks.callback_list import JobCallbacks
from elastable.callbacks.final_weights import finalize_averages
from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.in_process.fit_data import BegunFit, FitArguments, FitData, fit_data
from elastable.in_process.in_process_stores import StoreGiven, parts_for_fit, placed_in_stores
from elastable.jobs.job_hooks import JobHooks
from elastable.jobs.resuming.continuing import continue_job, opened_origin
from elastable.master.api import JobSpec, TaskKind
from elastable.master.backend.contract import backend
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.model.dense import DenseModel
from elastable.master.model.keras_optimizer import accumulated_by
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.models.configuration import config_of
from elastable.output.progress_bars import JobProgress
from elastable.process.repeating import repeating
from elastable.worker.keras.same_optimizer import kept_traces
from elastable.worker.keras.seeds import fit_seeds, layers_of
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.streams.event_reader import EventReader
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.runtime.work_here import WorkHere
from elastable.worker.step.forward import batch_spec
from elastable.worker.user_model.build import build_model, for_model, sample_batch, warn_of_other_numbers
from elastable.worker.user_model.offload import OffloadedEmbedding, offload_built

_SHOW_EVERY_S = 0.5


def fit(
    model: keras.Model,
    x: object = None,
    y: object = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str | bool = "auto",
    callbacks: object = None,
    validation_split: float = 0.0,
    validation_data: object = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: object = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: object = 1,
    *,
    grads_to_wait: int | None = None,
    average: str = "mean",
    evaluate_every: int = 0,
    linger: float = 5.0,
    until: str | None = None,
    max_bad_events: int = 100,
    seed: int | None = None,
    store: StoreGiven = None,
    locations: LocationSettings | None = None,
    offload_embeddings_above: int = 0,
    lazy: bool | None = True,
    not_finite: str = "refuse",
    continue_from: str | Path | None = None,
    leave_out: Sequence[str] = (),
    on: str | None = None,
    cluster: Mapping[str, object] | None = None,
) -> keras.callbacks.History:
    """Trains a compiled Keras model whose embedding tables live in a store, in this process or on a cluster.

    The arguments up to `validation_freq` are those of `model.fit` (docs/keras.md), which does the same, `lazy=None`.
    Afterwards the model's layers read from the store. A second call continues from the first, to the bit.

    Args:
        model: A compiled Keras model with `et.Embedding` layers.
        x: Data for `model.fit`, or a Reader; without `y` also a tuple (x, y) or (x, y, sample_weight), or a dict with
            these keys. A stream without an end needs `steps_per_epoch`.
        batch_size: Records in a micro-batch; None: a stream's own, else 32. A stream that ends is read once, cut anew.
        grads_to_wait: Micro-batches of one update; None: the optimizer's gradient_accumulation_steps, else 1.
        average: "mean": the numbers of plain Keras on one batch of all their records, or a refusal; "records": weighted
            by their records; "batches": equally, as with Keras' gradient_accumulation_steps; "sum": added.
        evaluate_every: Versions between further evaluations, within epochs; 0: none.
        linger, until, max_bad_events: Of a stream of events, as of `elastable train` (docs/data.md).
        seed: Of initial rows, the record order and dropout, as of `elastable train --seed`. None: as in plain Keras, by
            layers' seeds and `keras.utils.set_random_seed`.
        store: Where the tables live: a URL such as "redis://localhost:6379", a store, or None: in this process's
            memory. With `locations` it may be several: "memory", "file" or "redis" -> URL or store.
        locations: Which tables live where; None: all in the (first) store.
        offload_embeddings_above: Plain Keras embeddings of more elements move to the store, with their values; 0: none.
        lazy: Whether a step moves only the rows that its batch touches, where the layer does not say; False: momentum
            and decay move all rows, as in plain Keras (docs/fit.md); None: False for tables with `input_dim`.
        not_finite: "refuse" gradients with NaN or Inf (an error), or "skip" them.
        continue_from: Begin as another job ended, on new data: a checkpoint, a run directory, or the URL of a store
            with a log, also of `store` itself (docs/checkpoints.md). leave_out: Of it what the model no longer has.
        on: None: this process; or where else, as of `elastable train --on` (docs/engines.md): the weights come back.
        cluster: Of `on`: options of `elastable train` by name, such as `{"workers": 4, "checkpoint_dir": "s3://b/c"}`.

    Returns:
        `History`, as of Keras; its attribute `evaluations` has a dict for each evaluation within an epoch.

    Raises:
        ElastableError: data, model, callbacks or settings that cannot be used.
        KeyboardInterrupt: Ctrl-C while it trains on a cluster; the model has the weights of the last version then.
    """
    settings = FitArguments(**{name: of for name, of in locals().items() if name not in ("model", "on", "cluster")})
    if on is None:
        if cluster is not None:
            raise BadInput('cluster= needs on=, as in on="ray"')
        return _run_here(model, settings)
    from elastable.in_process.fit_elsewhere import fit_on

    return fit_on(model, settings, on, cluster or {}, lambda: _begun(model, settings))


# The job: its parts, its worker, and what shows how far it is


def _begun(model: keras.Model, settings: FitArguments) -> BegunFit:
    """Builds the model, makes its tables and fills them."""
    seeds = fit_seeds(settings.seed, model, settings.initial_epoch)
    data = fit_data(settings)
    if settings.evaluate_every and data.validation is None:
        raise BadInput(f"evaluate_every={settings.evaluate_every}: need validation_data to evaluate on")
    train = for_model(data.train, model)
    sample = sample_batch(train, model)
    if ("built", repr(batch_spec(sample))) not in kept_traces(model):
        build_model(model, sample)
    above = settings.offload_embeddings_above
    moved = offload_built(model, above) if above else {}
    parts = parts_for_fit(model, batch_spec(sample, model), seeds, settings.lazy)
    job = _job(parts, data, settings, seeds.order)
    warn_of_other_numbers(model, job)
    # A job counts its versions from epoch 0, also where the rows are older.
    version, origin = Schedule(job).first_version(settings.initial_epoch), settings.continue_from
    store = placed_in_stores(parts, settings.store, settings.locations, version, moved, origin)
    if store.keeps_records:
        job = replace(job, offload_above=above, backend=backend().name, model_config=config_of(model))
    kept = kept_traces(model) if parts.steps is None else {}
    dense: DenseModel = kept["dense"] if "dense" in kept else parts.dense()
    stream: DocumentFields = {}
    if origin is not None:
        with opened_origin(origin, store if origin == settings.store else None) as opened:
            beginning = continue_job(opened, parts, store, dense, settings.leave_out, moved=moved)
        job, version, stream = replace(job, **beginning.before), beginning.progress.version, beginning.progress.stream
    records = Schedule(job).records_before(version)
    start = Progress(version, evaluated=True, records=records, stream=stream) if version else Progress()
    return BegunFit(data, train, sample, parts, job, store, dense, start, seeds.keras)


def _run_here(model: keras.Model, settings: FitArguments) -> keras.callbacks.History:
    """Trains the model; returns Keras' `History`."""
    fit = _begun(model, settings)
    data, train, parts, job, store, dense = fit.data, fit.train, fit.parts, fit.job, fit.store, fit.dense
    kept = kept_traces(model) if parts.steps is None else {}
    metrics: ModelMetrics = kept["metrics"] if "metrics" in kept else ModelMetrics(model)
    # The worker shares the model with the master: it cannot hold another version's variables meanwhile.
    options = MasterOptions(
        evaluate_every=settings.evaluate_every, concurrent_evaluation=False, validation_freq=settings.validation_freq,
        uneven=data.train.batches is not None, linger_s=settings.linger, until=settings.until,
        max_bad_events=settings.max_bad_events,
    )  # fmt: skip
    events = train if isinstance(train, EventReader) else None
    master = Master(job, store, dense, metrics, start=fit.start, options=options, events=events)
    readers: dict[TaskKind, Reader] = {TaskKind.TRAIN: train}
    if data.validation is not None:
        readers[TaskKind.EVALUATE] = data.validation
    model.make_train_function()  # whose steps are traced: with the one of before until somebody makes it anew
    computer = MicroBatchComputer(
        model, job, readers, fit.sample, store, parts.tables, keras_draws=fit.keras_draws, shares_model=True
    )
    if parts.steps is None:
        form = ("built", repr(batch_spec(fit.sample)))
        kept_traces(model).update({form: True, "dense": dense, "metrics": metrics})
    if settings.backed_up:
        _refuse_backup_of_slots(model, parts.tables)
    with ExitStack() as held:
        even = job.even_batches
        joined = JobCallbacks(
            settings.callbacks, model, dense, store, job, master.progress, in_job=False, verbose=settings.verbose,
            of=f"fit of {job.micro_batch_size} x {computer.spec!r}, {even=}",
        )  # fmt: skip
        held.enter_context(closing(joined.best))
        for layer in store_layers(model):
            held.enter_context(layer.in_fit(model))
        return _run(parts, store, master, computer, dense, settings, joined)


def _job(parts: Assembly, data: FitData, settings: FitArguments, seed: int) -> JobSpec:
    batches = 0
    for records in data.train.parts or (len(data.train),) if not data.train.streams else ():
        batches -= -records // data.batch_size
    together, average = accumulated_by(parts.model.optimizer, batches, settings.grads_to_wait, settings.average)
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
        seed=seed,
        train_records=data.train.steps_per_epoch * together * data.batch_size
        if isinstance(data.train, EventReader)
        else len(data.train),
        stream=data.train.streams,
        parts=data.train.parts,
        validation_records=0 if data.validation is None else len(data.validation),
        shuffle=settings.shuffle,
        not_finite=settings.not_finite,
        steps_per_epoch=data.steps_per_epoch,
        initial_epoch=settings.initial_epoch,
        evaluation_batch_size=data.validation_batch_size,
    )


def _run(
    parts: Assembly,
    store: EmbeddingStore,
    master: Master,
    computer: MicroBatchComputer,
    dense: DenseModel,
    settings: FitArguments,
    joined: JobCallbacks,
) -> keras.callbacks.History:
    """Callbacks, progress and the job itself, from its first version to its last."""
    schedule = joined.schedule
    # In lines, where a terminal is not asked to show how far the job is.
    console = Console(quiet=settings.verbose == 0, force_terminal=None if settings.verbose == 1 else False)
    progress = JobProgress(console, schedule.records_before(schedule.versions_total))
    evaluations: list[dict[str, float]] = []

    def evaluated(version: int, logs: Mapping[str, float]) -> None:
        evaluations.append({"version": version, **logs})
        progress.evaluation(version, logs)

    hooks = JobHooks(
        joined,
        master.stop,
        on_epoch=partial(progress.epoch, settings.epochs),
        evaluated=evaluated,
        version=schedule.first_version(schedule.job.initial_epoch),
    )
    joined.begin()
    parts.attach()  # a callback may have loaded weights
    with ExitStack() as held:
        held.enter_context(progress)
        work = held.enter_context(closing(WorkHere(master, computer, store, rows_change=joined.sees_versions)))
        if settings.verbose == 1:
            held.enter_context(repeating(lambda: progress.show(master.status()), _SHOW_EVERY_S, "elastable-watch"))
        master.run(hooks, work)
    finalize_averages(dense, store, parts.tables)
    joined.end(hooks.logs)
    joined.history.evaluations = sorted(evaluations, key=lambda entry: entry["version"])
    return joined.history


def _refuse_backup_of_slots(model: keras.Model, tables: dict[str, TableSpec]) -> None:
    """Raises `Unsupported` where a backup would lack the slots of a table: the file holds a plain Keras embedding."""
    for layer in layers_of(model):
        spec = tables.get(layer.name) if isinstance(layer, OffloadedEmbedding) else None
        if spec is None or not row_optimizer(spec.optimizer).slots:
            continue
        raise Unsupported(
            f"callback BackupAndRestore: embedding layer {layer.name!r} is offloaded, and Keras' file has no place for "
            "the slots of its optimizer; use et.Embedding, or a job with --checkpoint-dir and --resume"
        )
