"""From a person's options to a job that is ready to run."""

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import keras

from elastable.assembly import Assembly, locations_of, open_places, refuse_averages, refuse_beside_servers
from elastable.embedding_store.composite.locations import plan_tables, refuse_sharding, storage_of_tables
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, NotReady, Unsupported
from elastable.embedding_store.open_store import check_store_url, operation_deadline
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.support.store_url import SERVERS
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.jobs.options import JobOptions
from elastable.jobs.resuming.continuing import continue_job, opened_origin
from elastable.jobs.resuming.resume import Beginning, JobStart, finished
from elastable.master.api import JobSpec, TaskKind
from elastable.master.backend.contract import backend
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import warm_start
from elastable.master.checkpoints.storage.checkpoint_locations import newest_checkpoint
from elastable.master.model.dense import DenseModel
from elastable.master.model.keras_optimizer import accumulated_by, accumulation_of
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.tasks.progress import Progress
from elastable.models.configuration import config_of
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.layers.model_tables import store_layers, tables_given
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.streams.event_reader import EventReader
from elastable.worker.rows.saved_rows import leaving_rows_out
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.step.forward import batch_spec
from elastable.worker.user_model.build import (
    for_model,
    make_model,
    needs_sample,
    sample_batch,
    warn_of_other_numbers,
)
from elastable.worker.user_model.model_file import ModelFile, load_model_file
from elastable.worker.user_model.offload import refuse_slots_left_out

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """Everything the master of a job needs.

    Attributes:
        parts: Of the master's model, which holds the dense variables.
        readers: The splits, for a worker of this process; where all are in others, only a stream of events is kept.
        store: Holds the tables, at the version of `progress`.
        progress: Where the job begins.
        resumed: The checkpoint that the store was restored from; None: from none.
        warm: The one whose rows a new job may begin with; None: none.
    """

    job: JobSpec
    file: ModelFile
    parts: Assembly
    readers: Mapping[TaskKind, Reader]
    store: EmbeddingStore
    dense: DenseModel
    metrics: ModelMetrics
    progress: Progress
    resumed: Checkpoint | None = None
    warm: Checkpoint | None = None

    @property
    def model(self) -> keras.Model:
        """The master's model."""
        return self.parts.model

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Table name -> its spec, of those in the store."""
        return self.parts.tables

    def computer(self, deadline_s: float) -> MicroBatchComputer:
        """Computes micro-batches with the very model, for a worker in its master's thread."""
        sample = sample_batch(self.readers[TaskKind.TRAIN], self.model)
        return MicroBatchComputer(
            self.model, self.job, self.readers, sample, self.store, self.tables, deadline_s, shares_model=True
        )


def prepare_job(options: JobOptions, credentials: Credentials | None = None) -> PreparedJob:
    """Loads the model file, builds the model, discovers its tables and creates them.

    Args:
        credentials: Of the client of its store servers; None: those of the environment.

    Raises:
        ElastableError: whatever of the options, the model file, its data, the store or the checkpoint cannot be used,
            by name.
    """
    locations = locations_of(options.locations, options.store)
    for url in locations.stores.values():
        check_store_url(url)
    checkpoint = _checkpoint_to_resume(options)
    file = load_model_file(options.model_file)
    train, parts = _parts(file, options)
    model = parts.model
    refuse_slots_left_out(model)
    refuse_sharding(locations.settings, options.mode)
    places = storage_of_tables(plan_tables(parts.tables, locations.settings))
    if options.locations is not None and options.store.startswith(SERVERS):
        refuse_beside_servers(options.locations, locations, places, options.store)
    parts.place(places)
    warm = _warm_start(parts, options)
    readers = {TaskKind.TRAIN: train}
    if (validation := file.reader("validation")) is not None:
        readers[TaskKind.EVALUATE] = validation
    job = _described(options, file, readers, parts)
    warn_of_other_numbers(model, job)
    dense = parts.dense()
    start = JobStart(options, job, parts.tables, checkpoint, _continued(options, parts))
    store = open_places(
        locations,
        places,
        options.store,
        shared=options.transport != "grpc",
        deadline_s=operation_deadline(options.deadline_s),
        on_broken=None if checkpoint is None else start.give_way,
        credentials=credentials,
        acknowledged_in=options.run_dir,
        accept_version=None if options.resume else 0,  # a new job begins with an empty store, whatever was there
    )
    try:
        beginning = _filled(start, store, parts, dense, warm)
    except BaseException:
        store.close()
        raise
    job = replace(job, job=beginning.job or job.job, **beginning.before)
    if not options.works_here:
        readers = {TaskKind.TRAIN: train} if train.streams else {}
    of_model = job, file, parts, readers, store, dense, ModelMetrics(model)
    return PreparedJob(*of_model, beginning.progress, beginning.checkpoint, warm)


# Fields of a `JobSpec` that are options of the same name.
_SAME_NAME = (
    "mode", "micro_batch_size", "seed", "intra_op_threads", "offload_above", "shuffle", "not_finite",
    "staleness_bound", "staleness_modulation",
)  # fmt: skip


def _described(options: JobOptions, file: ModelFile, readers: Mapping[TaskKind, Reader], parts: Assembly) -> JobSpec:
    """A new job as the options describe it. Raises `Unsupported`, `BadInput` and `BadSpec`."""
    model, size, train = parts.model, options.micro_batch_size, readers[TaskKind.TRAIN]
    if options.until is not None and not train.streams:
        raise BadInput(f"--until {options.until}: data('train') of {file.path} is no stream of events: leave it out")
    batches = 0 if train.streams else sum(-(-records // size) for records in train.parts or (len(train),))
    asked = options.grads_to_wait or (None if accumulation_of(model.optimizer) else options.default_grads_to_wait)
    grads_to_wait, average = accumulated_by(model.optimizer, batches, asked, options.average)
    if options.mode == "async" and accumulation_of(model.optimizer):
        raise Unsupported("gradient_accumulation_steps in mode async, where every batch is an update: leave it out")
    return JobSpec(
        job=uuid.uuid4().hex[:12],
        grads_to_wait=grads_to_wait,
        store_url=options.store if options.store.startswith(SERVERS) else "master",
        model_file=str(file.path),
        model_sha256=file.sha256,
        on_worker=parts.on_worker,
        train_records=train.steps_per_epoch * grads_to_wait * size if isinstance(train, EventReader) else len(train),
        stream=train.streams,
        epochs=options.epochs or (0 if train.streams else 1),
        parts=train.parts,
        records_digest=train.digest(),
        validation_records=len(readers.get(TaskKind.EVALUATE, ())),
        average=average,
        backend=backend().name,
        model_config=config_of(model),
        **{name: getattr(options, name) for name in _SAME_NAME},
    )


def _filled(
    start: JobStart, store: EmbeddingStore, parts: Assembly, dense: DenseModel, warm: Checkpoint | None
) -> Beginning:
    """Fills the store with the tables that the job begins with, and attaches the model's layers."""
    options = start.options
    # An address where nobody answers is refused at once: it may be a typo. A server that loads its data is awaited.
    retry(store.version, "reading the store's version", options.deadline_s, on=(NotReady,))
    refuse_averages(parts.model.optimizer, store, parts.tables)
    beginning = start.fill(store, dense)
    if beginning.job is not None:
        if given := tables_given(store_layers(parts.model)):
            _log.warning(
                "the rows that model() gives (%s) are left out: the job goes on from %s, version %d",
                ", ".join(given),
                "the store" if beginning.checkpoint is None else beginning.checkpoint.address,
                beginning.progress.version,
            )
        parts.attach(store)
        return beginning
    if start.continued is not None:
        return beginning
    parts.fill(store, 0)
    if warm is not None:
        warm_start(warm, store, parts.tables, options.warm_tables)
    return beginning


def _continued(
    options: JobOptions, parts: Assembly
) -> Callable[[EmbeddingStore, DenseModel, Callable[[], None]], Beginning] | None:
    """As `JobStart.continued`, of `--continue-from`."""
    place = options.continue_from
    if place is None:
        return None

    def begin(store: EmbeddingStore, dense: DenseModel, make_room: Callable[[], None]) -> Beginning:
        with opened_origin(place, store if options.continues_in_place else None) as origin:
            return continue_job(origin, parts, store, dense, options.leave_out, make_room)

    return begin


def _warm_start(parts: Assembly, options: JobOptions) -> Checkpoint | None:
    """The checkpoint of `--warm-start`.

    Raises:
        BadInput: model() gives rows of the same tables, too, or one of them stays on the workers.
    """
    if options.warm_start is None:
        return None
    warm = open_checkpoint(options.warm_start)
    wanted = set(options.warm_tables or warm.manifest.tables)
    if kept := wanted.intersection(parts.on_worker):
        raise BadInput(
            f"--warm-start {options.warm_start}: table {', '.join(sorted(kept))} stays on the workers, as a variable, "
            "and takes no rows: place it in a store (--locations), or name the other tables by --warm-tables"
        )
    both = wanted.intersection(tables_given(store_layers(parts.model)))
    if both:
        raise BadInput(
            f"--warm-start {options.warm_start}: model() gives rows of {', '.join(sorted(both))}, too (it loads them, "
            "or sets its layer's weights): leave --warm-start out, return a model without rows, or name the other "
            "tables by --warm-tables"
        )
    return warm


def tables_of(model_file: Path, offload_above: int = 0) -> tuple[keras.Model, dict[str, TableSpec]]:
    """The built model of a model file, and the tables that it needs, before any is placed; no row is read.

    Raises:
        ElastableError: the file, its model or its data cannot be used.
    """
    file = load_model_file(model_file)
    with leaving_rows_out():
        model = make_model(file.model, file.train_reader, 0, offload_above)
    spec = _spec_of(model, file.train_reader()) if needs_sample(model) else None
    parts = Assembly(model, spec, 0)
    parts.find_tables()
    return model, parts.tables


def _parts(file: ModelFile, options: JobOptions) -> tuple[Reader, Assembly]:
    """The training records, and the model that the file makes."""
    train = file.train_reader()
    model = make_model(file.model, train, options.seed, options.offload_above)
    train = for_model(train, model)
    parts = Assembly(model, _spec_of(model, train), options.seed)
    parts.find_tables(options.lazy)
    return train, parts


def _spec_of(model: keras.Model, train: Reader) -> BatchSpec:
    return batch_spec(sample_batch(for_model(train, model), model), model)


def _checkpoint_to_resume(options: JobOptions) -> Checkpoint | None:
    """The checkpoint that the job may go on from. Raises `BadInput` where a new job would write next to another's."""
    found = None if options.checkpoint_dir is None else newest_checkpoint(options.checkpoint_dir)
    # Nothing was saved yet at the first start of a job that is always started with --resume.
    if found is None or (options.overwrite and not options.resume):
        return None
    checkpoint = open_checkpoint(found)
    if options.continue_from is not None and found == newest_checkpoint(options.continue_from):
        # The next job of a series with one directory; an earlier try of this one is resumed.
        return checkpoint if options.resume and not finished(checkpoint.job, checkpoint.progress()) else None
    if not options.resume:
        raise BadInput(
            f"--checkpoint-dir {redacted(str(options.checkpoint_dir))} holds checkpoints of job "
            f"{checkpoint.job.get('job', '')} (the newest is {checkpoint.name}, written "
            f"{checkpoint.manifest.written}): go on with that job by --resume, give this one another directory, or let "
            "it write next to them with --overwrite"
        )
    return checkpoint
