"""Where a job begins: anew, at a checkpoint, or at the current version of a store that outlived its master."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from elastable.embedding_store.broken_store import BrokenStore
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    BadInput,
    ShardLost,
    StoreBroken,
    StoreFailed,
    TableNotFound,
    Unsupported,
)
from elastable.jobs.options import JobOptions
from elastable.jobs.store_watch import refuse_live_owner
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import Checkpoint
from elastable.master.checkpoints.restoring import refuse_other_model, restore_tables
from elastable.master.commits.version_record import VersionRecord, job_from_json
from elastable.master.model.dense import DenseModel
from elastable.master.model.discovery import create_tables
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.models.configuration import refuse_other_words

_log = logging.getLogger(__name__)

_PINS_END_S = 90.0  # longer than the leases of a master that died


def _claim(store: EmbeddingStore, overwrite: bool) -> None:
    """Makes sure that a job begins with an empty store. Raises `BadInput` where tables are not to be dropped."""
    held = store.specs()
    if not held and store.version() == 0:
        return
    if not overwrite:
        raise BadInput(
            f"the store holds {len(held)} tables at version {store.version()} ({', '.join(sorted(held)[:5])}): go on "
            "from its checkpoint with --resume, drop them with --overwrite, or use another ?namespace= in its URL"
        )
    # Until what a master that died had pinned has run out: no table is dropped before. Readers that live go on.
    give_up = time.monotonic() + _PINS_END_S
    warned = False
    while (pins := store.pins()) and time.monotonic() < give_up:
        left = max(pin.lease_left_s for pin in pins)
        if not warned:
            warned = True
            _log.warning(
                "versions %s of the store are pinned; if it was by a master that died they are free in %.0f s",
                ", ".join(map(str, sorted({pin.version for pin in pins}))),
                left,
            )
        time.sleep(min(max(left, 0.01), 0.25))
    for name in held:
        store.drop_table(name)
    store.reset_version(0)


def _create(store: EmbeddingStore, tables: Mapping[str, TableSpec], overwrite: bool) -> None:
    """Makes the tables of a job that begins; what is left of tables of which a shard was lost may be dropped first."""
    try:
        create_tables(store, tables)
    except ShardLost:
        if not overwrite:
            raise
        for name in tables:
            with suppress(TableNotFound):
                store.drop_table(name)
        store.reset_version(0)
        create_tables(store, tables)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a job begins.

    Attributes:
        progress: Its place.
        job: The id of the job that goes on; None: a new one begins.
        checkpoint: That the store was restored from; None: from none.
        before: What the job counts on from (`Schedule.before_next`), where it continues another one.
    """

    progress: Progress
    job: str | None = None
    checkpoint: Checkpoint | None = None
    before: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobStart:
    """Decides where a job begins.

    Attributes:
        options: Whether an earlier job goes on (`resume`) or makes room for a new one when it has finished (`rerun`),
            its tables are dropped (`overwrite`), and the store is taken from a process that uses it (`take_over`).
        job: The new job, as the options describe it.
        tables: That its model needs.
        checkpoint: The newest one to resume from; None: there is none.
        continued: Begins a new job that continues another one, in a store, with a dense part; what it is given last
            empties the store. None: a new job begins with nothing.
    """

    options: JobOptions
    job: JobSpec
    tables: Mapping[str, TableSpec]
    checkpoint: Checkpoint | None
    continued: Callable[[EmbeddingStore, DenseModel, Callable[[], None]], Beginning] | None = None

    def give_way(self, error: StoreBroken, broken: BrokenStore) -> None:
        """Lets `open_store` delete what is left of a broken store, since the job has a checkpoint.

        Everything that could keep the checkpoint from being restored is checked before.

        Raises:
            BadInput: another process uses the store, or it is another job's.
            CheckpointError: the checkpoint is damaged, or another model's.
            Unsupported: the job that was saved had other options.
        """
        checkpoint = self.checkpoint
        assert checkpoint is not None
        if not self.options.take_over:
            refuse_live_owner(broken.other_writer)
        if self._makes_room(checkpoint.job, checkpoint.progress()):
            _log.warning("the store cannot go on: %s; what is left of it is deleted, and a new job begins", error)
            return
        self._refuse_anothers_record(broken.record(), checkpoint)
        refuse_other_job(checkpoint.address, checkpoint.job, self.job)
        refuse_other_model(checkpoint, self.tables)
        checkpoint.verify()
        _log.warning(
            "the store cannot go on: %s; what is left of it is deleted, and the job goes on from %s, version %d",
            error,
            checkpoint.address,
            checkpoint.version,
        )

    def fill(self, store: EmbeddingStore, dense: DenseModel) -> Beginning:
        """Makes the tables and the dense part those that the job begins with.

        With `options.resume`, a store that keeps records is brought to the last version that was committed to it; the
        job goes on there, unless the checkpoint is newer. Nothing is copied then: the rows are where they were.

        Args:
            store: Holds the tables.
            dense: The dense part of the model; changed where the job goes on.

        Raises:
            BadInput: the store holds what is not to be dropped, another process is using it, or its rows have moved.
            Unsupported: the job that was saved had other options.
            CheckpointError: what was saved is of another model.
            SpecConflict: a table in the store has another spec.
        """
        overwrite = self.options.overwrite
        if not self.options.take_over:
            refuse_live_owner(store.other_writer)
        if isinstance(store, StoreServers) and not overwrite:
            store.refuse_moved()
        if self.options.resume:
            beginning, overwrite = self._resumed(store, dense)
            if beginning is not None:
                return beginning
        if self.continued is not None:
            return self.continued(store, dense, lambda: self._make_room(store, overwrite))
        self._make_room(store, overwrite)
        return Beginning(Progress())

    def _make_room(self, store: EmbeddingStore, overwrite: bool) -> None:
        _claim(store, overwrite)
        _create(store, self.tables, overwrite)

    def _makes_room(self, saved: DocumentFields, progress: Progress) -> bool:
        """Whether a saved job is done (`--rerun`): it has had its last version, and no more epochs are asked for."""
        return self.options.rerun and finished(saved, progress) and self.job.epochs <= int(saved["epochs"])

    def _resumed(self, store: EmbeddingStore, dense: DenseModel) -> tuple[Beginning | None, bool]:
        """Where an earlier job goes on (None: there is none), and whether tables in the store may be dropped."""
        overwrite, checkpoint = self.options.overwrite, self.checkpoint
        recorded = self._last_record(store)
        if recorded is not None and self.options.continues_in_place and finished(recorded.job, recorded.progress):
            return None, overwrite  # it is the job to continue
        if recorded is not None and self._makes_room(recorded.job, recorded.progress):
            _log.warning("job %s in the store is finished: its tables make room for a new job", recorded.job["job"])
            recorded, overwrite = None, True
        if checkpoint is not None and self._makes_room(checkpoint.job, checkpoint.progress()):
            checkpoint = None
        if recorded is not None and _goes_on(recorded, checkpoint, overwrite):
            progress = recorded.progress
            refuse_other_job("the job in the store", recorded.job, self.job)
            require_record_of(store, recorded)
            # They are there; one with another spec is refused.
            create_tables(store, self._seeded_as_there(recorded.job, store.specs()))
            dense.restore(recorded.dense)
            return Beginning(progress, str(recorded.job["job"]), before=_before(recorded.job)), overwrite
        if checkpoint is not None:
            refuse_other_job(checkpoint.address, checkpoint.job, self.job)
            saved = {name: entry.spec for name, entry in checkpoint.manifest.tables.items()}
            tables = self._seeded_as_there(checkpoint.job, saved)
            refuse_other_model(checkpoint, tables)
            if store.specs():
                checkpoint.verify()  # before anything in the store is dropped
            dense.restore(checkpoint.dense())
            _claim(store, overwrite=True)
            _create(store, tables, overwrite=True)
            restore_tables(checkpoint, store)
            job = checkpoint.job
            return Beginning(checkpoint.progress(), str(job["job"]), checkpoint, _before(job)), overwrite
        # The first master may have died before its first commit: what it created there holds nothing yet.
        empty = store.keeps_records and store.version() == 0 and set(store.specs()) <= set(self.tables)
        return None, overwrite or empty

    def _seeded_as_there(self, job: DocumentFields, there: Mapping[str, TableSpec]) -> dict[str, TableSpec]:
        """The tables, with the seeds of initial rows that a job took over with the rows of one that it continues."""
        tables = dict(self.tables)
        for name in tables.keys() & there.keys() if _before(job)["versions_before"] else ():
            tables[name] = replace(tables[name], seed=there[name].seed)
        return tables

    def _last_record(self, store: EmbeddingStore) -> VersionRecord | None:
        """The record of the store's version, if it can go on there. Raises `StoreBroken` without a checkpoint."""
        if not store.keeps_records:
            return None
        try:
            if taken_back := store.recover():  # an interrupted commit
                _log.warning("a commit had broken off in the store: %d rows are as they were before it", taken_back)
            record = store.record()
            return None if record is None else VersionRecord.from_bytes(record)
        except StoreBroken as error:
            if self.checkpoint is None:
                raise
            record = None
            with suppress(StoreFailed):  # shards that are apart say nothing
                record = store.record()
            self._refuse_anothers_record(record, self.checkpoint)
            message = "the store cannot go on: %s; the job goes on from %s instead"
            _log.warning(message, error, self.checkpoint.address)
            return None

    def _refuse_anothers_record(self, record: bytes | None, checkpoint: Checkpoint) -> None:
        """Raises `BadInput` where a version's record is not of the checkpoint's job, unless it may be dropped."""
        if record is not None:
            _goes_on(VersionRecord.from_bytes(record), checkpoint, self.options.overwrite)


def _goes_on(standing: VersionRecord, checkpoint: Checkpoint | None, overwrite: bool) -> bool:
    """Whether the job goes on in the store, and not from the checkpoint.

    Raises:
        BadInput: they are of different jobs, and nothing is to be dropped.
    """
    if checkpoint is None:
        return True
    there, saved = standing.job["job"], checkpoint.job["job"]
    if there == saved:
        return standing.progress.version >= checkpoint.version
    if overwrite:
        return False
    raise BadInput(
        f"the store holds job {there} at version {standing.progress.version}, and {checkpoint.address} is of job "
        f"{saved}: with --overwrite the checkpoint takes the store's place; or use another ?namespace="
    )


def require_record_of(store: EmbeddingStore, record: VersionRecord) -> None:
    """Raises `BadInput` where a store's record is not of the version that the store is at."""
    if record.progress.version != store.version():
        raise BadInput(
            f"the store is at version {store.version()}, and its record of version {record.progress.version}: who else "
            "writes there?"
        )


_BEFORE = ("versions_before", "parts_before", "micro_batches_before")


def _before(saved: DocumentFields) -> dict[str, int]:
    return {name: int(saved.get(name, 0)) for name in _BEFORE}


def finished(saved: DocumentFields, progress: Progress) -> bool:
    """Whether a saved job has had its last version."""
    return Schedule(job_from_json(saved)).finished(progress.version)


_SAME = (
    "mode", "micro_batch_size", "grads_to_wait", "seed", "train_records", "shuffle", "average", "intra_op_threads",
    "on_worker", "parts", "stream", "records_digest",
)  # fmt: skip


def refuse_other_job(what: str, saved: DocumentFields, job: JobSpec) -> None:
    """Raises where a saved job computed with other numbers than `job` would.

    Raises:
        Unsupported: for other options or data.
        CheckpointError: its model has learned other words.
    """
    refuse_other_words(str(saved.get("model_config") or ""), job.model_config)
    saved = {**saved, **{name: tuple(saved.get(name, ())) for name in ("on_worker", "parts")}}
    differing = [
        f"{name} was {saved[name]} and is {getattr(job, name)}" for name in _SAME if saved[name] != getattr(job, name)
    ]
    if differing:
        raise Unsupported(
            f"{what} cannot be resumed with other numbers ({'; '.join(differing)}): give the same options and data. A "
            "new job on other data begins where this one ended by --continue-from"
        )
