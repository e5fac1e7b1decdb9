"""A new job, on new data, that begins as another one ended (`--continue-from`)."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import keras

from elastable.assembly import Assembly, as_there, refuse_averages
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.embedding_store.open_store import check_store_url, open_store
from elastable.embedding_store.support.store_url import MemoryUrl, file_folder
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.jobs.resuming.resume import Beginning, finished, require_record_of
from elastable.jobs.store_watch import refuse_live_owner
from elastable.master.api import Tensor
from elastable.master.backend.contract import backend
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.storage.checkpoint_locations import newest_checkpoint
from elastable.master.commits.version_record import VersionRecord, job_from_json
from elastable.master.model.dense import DenseModel
from elastable.master.model.keras_optimizer import inner_optimizer
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.models.configuration import config_of, refuse_other_words
from elastable.worker.layers.model_tables import pretrained_rows, store_layers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedJob:
    """What a job left behind, in a checkpoint or in a store with its records.

    Attributes:
        address: Where, for messages.
        job: The description of the job.
        dense: Its dense tensors, by key.
        specs: Its tables.
        rows, state: Of a table: its rows in blocks, and what it keeps besides.
        checkpoint: The checkpoint; None: a store.
        held: The store that the new job trains in, if its rows are there; nothing is copied then.
    """

    address: str
    job: DocumentFields
    progress: Progress
    dense: Mapping[str, Tensor]
    specs: Mapping[str, TableSpec]
    rows: Callable[[str], Iterator[RowBlock]]
    state: Callable[[str], TableState]
    checkpoint: Checkpoint | None = None
    held: EmbeddingStore | None = None

    def before(self) -> dict[str, int]:
        """`Schedule.before_next` of a job that continues it. Raises `CheckpointError` where its job is malformed."""
        return Schedule(job_from_json(self.job)).before_next(self.progress)


def _of_checkpoint(saved: Checkpoint) -> EndedJob:
    specs = {name: entry.spec for name, entry in saved.manifest.tables.items()}
    return EndedJob(
        saved.address, saved.job, saved.progress(), saved.dense(), specs, saved.rows, saved.table_state, saved
    )


def _of_store(store: EmbeddingStore, address: str, held: EmbeddingStore | None = None) -> EndedJob:
    """Raises `BadInput` where the store holds no version of a job."""
    place, record = redacted(address), None
    if store.keeps_records:
        store.recover()  # an interrupted commit
        record = store.record()
    if record is None:
        raise BadInput(f"continue from {place}: the store there holds no version of a job, with its record")
    found = VersionRecord.from_bytes(record)
    try:
        require_record_of(store, found)
    except BadInput as error:
        raise BadInput(f"continue from {place}: {error}") from error
    return EndedJob(
        place, found.job, found.progress, found.dense, store.specs(), store.scan, store.table_state, held=held
    )


@contextmanager
def opened_origin(place: str | Path, held: EmbeddingStore | None = None) -> Iterator[EndedJob]:
    """What a job left at a place.

    Args:
        place: A checkpoint, a folder of them, a run directory, or the URL of a store with a log.
        held: The store at that place, if the new job trains in it; None: it does not.

    Raises:
        BadInput: there is neither, or another process uses the store.
        CheckpointError, StoreBroken: what is there is damaged.
    """
    if held is not None:
        yield _of_store(held, str(place), held)
        return
    is_store = _is_store(place)
    found = newest_checkpoint(place) if not is_store or str(place).startswith("file:") else None
    if found is not None:
        yield _of_checkpoint(open_checkpoint(found))
    elif not is_store:
        raise BadInput(
            f"continue from {redacted(str(place))}: no checkpoint, no run directory, and no store with a log is there"
        )
    else:
        with open_store(str(place)) as store:
            refuse_live_owner(store.other_writer)
            yield _of_store(store, str(place))


def _is_store(place: str | Path) -> bool:
    """Whether it is the URL of a store; one in files must be there, as opening it would make it."""
    try:
        check_store_url(str(place))
    except BadInput:
        return False
    folder = None
    if str(place).startswith("memory"):
        folder = MemoryUrl.parse(str(place)).log
    elif str(place).startswith("file:"):
        folder = file_folder(str(place))
    return str(place) != "memory" and (folder is None or folder.exists())


def continue_job(
    origin: EndedJob,
    parts: Assembly,
    store: EmbeddingStore,
    dense: DenseModel,
    leave_out: Sequence[str] = (),
    make_room: Callable[[], None] = lambda: None,
    moved: Mapping[str, Float32] | None = None,
) -> Beginning:
    """Makes the store and the dense part of a model those that a job left, each table and variable by its name.

    Nothing is changed before everything has been compared.

    Args:
        parts: The model; its layers read from the store then.
        store: Of the new job.
        leave_out: Tables, and variables or what their paths begin with, that the model may lack.
        make_room: Empties the store, where the rows are not in it already.
        moved: Table name -> float32 `[vocabulary, dim]`: rows of Keras embeddings that moved to the store.

    Raises:
        CheckpointError: the model differs in more than new tables and variables, or what was left is damaged.
    """
    refuse_averages(parts.model.optimizer, store, parts.tables)
    before, job = origin.before(), str(origin.job.get("job", ""))
    try:
        specs = _matching(origin, parts.tables, leave_out)
        refuse_other_words(str(origin.job.get("model_config") or ""), config_of(parts.model))
        tensors, fresh = dense.from_names(origin.dense, leave_out)
    except CheckpointError as error:
        raise CheckpointError(f"{origin.address}, of job {job}: {error}") from error
    parts.tables.update(specs)
    rates = _assigned_rates(dense)
    if origin.held is None:
        if origin.checkpoint is not None and store.specs():
            origin.checkpoint.verify()  # before anything in the store is dropped
        make_room()
    new = [name for name in parts.tables if name not in origin.specs]
    given = {**pretrained_rows(store_layers(parts.model), unseeded=parts.as_keras), **(moved or {})}
    parts.fill(store, store.version(), given, others=specs)
    if origin.held is None:
        for name in specs:
            store.clear(name)
            store.put(name, origin.rows(name))
            state = origin.state(name)
            if state:
                store.put_table_state(name, state)
    if store.version() != origin.progress.version:
        store.reset_version(origin.progress.version)
    dense.restore(tensors)
    parts.attach(store)
    if fresh or new:
        _log.warning("new in this model, and begun anew: %s", ", ".join([*new, *fresh]))
    if rates != (now := _assigned_rates(dense)):
        _log.warning("learning rates go on as %s, where job %s ended; the model was compiled with %s", now, job, rates)
    if not finished(origin.job, origin.progress):
        _log.warning(
            "job %s had not ended, at version %d: what is left of its data is not trained. --resume, with its own data "
            "and options, goes on with it",
            job,
            origin.progress.version,
        )
    _log.info("continues job %s from %s, version %d", job, origin.address, origin.progress.version)
    # The same stream goes on behind its last event; another with partitions of the same names is refused.
    stream = {**origin.progress.stream, "cuts": [], "until": None, "bad_events": 0} if origin.progress.stream else {}
    progress = Progress(origin.progress.version, evaluated=True, stream=stream)
    return Beginning(progress, before=before)


def _assigned_rates(dense: DenseModel) -> list[float]:
    """Learning rates that are a variable, and no schedule of steps."""
    rates = [inner_optimizer(each)._learning_rate for each in dense.optimizers]
    return [float(backend().copied(rate)) for rate in rates if isinstance(rate, keras.Variable)]


def _matching(origin: EndedJob, tables: Mapping[str, TableSpec], leave_out: Sequence[str]) -> dict[str, TableSpec]:
    """The model's tables that the job had, as they are to be: with its seeds of initial rows.

    Raises:
        CheckpointError: a table of the job is missing, or is another one.
    """
    found = {}
    for name, spec in tables.items():
        if (there := origin.specs.get(name)) is None:
            continue
        found[name] = as_there(replace(spec, seed=there.seed), there)
        if differences := there.differences(found[name]):
            pairs = "; ".join(f"{part} was {was!r} and is {now!r}" for part, (was, now) in differences.items())
            raise CheckpointError(
                f"table {name!r}: {pairs}: declare it as it was; or give it another name, under which it begins anew; "
                "or begin a new job with its rows by --warm-start"
            )
    missing = sorted(set(origin.specs) - set(tables))
    if unknown := [name for name in missing if name not in leave_out]:
        raise CheckpointError(
            f"the model has no table {', '.join(unknown)}: leave it out by name (--leave-out, leave_out=), or give the "
            "layer the name that it had"
        )
    if missing and origin.held is not None:
        raise CheckpointError(
            f"table {missing[0]!r} cannot be left out where it is: continue from a checkpoint, into another store"
        )
    return found
