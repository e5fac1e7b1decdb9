"""The versions of a trained model: in a run, among checkpoints, or in a store that a job writes; and their model."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import keras

from elastable.embedding_store.contract.malformed import UNREADABLE, DocumentFields
from elastable.embedding_store.contract.row_source import RowSource, variables_of
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import (
    BadInput,
    CheckpointError,
    ElastableError,
    ModelError,
    StoreBroken,
    Unsupported,
)
from elastable.embedding_store.open_store import open_follower
from elastable.embedding_store.store_reader import HeldLog, HeldReader, HeldServers
from elastable.embedding_store.support.store_url import SERVERS
from elastable.embedding_store.tiers.redis.url import SCHEMES, redacted
from elastable.master.api import Tensor
from elastable.master.backend.contract import backend, take_statistics
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.storage.checkpoint_files import MANIFEST
from elastable.master.checkpoints.storage.checkpoint_locations import files_at
from elastable.master.commits.version_record import VersionRecord
from elastable.master.model.dense import DenseTensors
from elastable.master.rpc.client import MasterClient
from elastable.models.configuration import model_of, same_model
from elastable.output.noted import JOB_FILE
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.rows.saved_rows import leaving_rows_out
from elastable.worker.user_model.build import make_model
from elastable.worker.user_model.model_file import load_model_file

_UNFOLLOWED = ("file://", "grpcs://", "dns://", "token:", "encoding:")

_ASKED_S = 5.0  # for the answer of a job's master, which may be over


class Versions(Protocol):
    """Where a predictor's versions come from."""

    rows: HeldReader | HeldLog | HeldServers | EmbeddingStore
    job: DocumentFields
    look_s: float | None  # between two looks for a newer one; None: there never is one

    def current(self, taken: int) -> AbstractContextManager[tuple[int, VersionRecord | None]]:
        """The version that `rows` are of within the block, and all else of it; None: it is version `taken`."""

    def advance(self) -> "Versions":
        """Goes on to the newest version; what has it, which may be another object."""

    def newest(self) -> int: ...

    def close(self) -> None: ...


class Saved:
    """The version of a checkpoint, or the newest one of a run; or that of a serving folder, whose log goes on."""

    def __init__(self, place: str | Path, version: int | None = None, deadline_s: float | None = None) -> None:
        try:
            self._place, self._saved = place, open_checkpoint(place, version)
        except (BadInput, CheckpointError) as error:
            if not str(place).startswith(_UNFOLLOWED):
                raise
            raise Unsupported(
                f"{redacted(str(place))} is read by its job alone, and no checkpoints are there: name the job's run, "
                "its checkpoints (--checkpoint-every N saves some), its master (grpc://host:port), or its store "
                "servers (servers:host:port,...)"
            ) from error
        self.job, self._deadline_s = self._saved.job, deadline_s
        self._log = log if is_followed(log := str(self.job.get("store_url", ""))) else None
        self.look_s = None if MANIFEST in files_at(str(place)).names() else 1.0
        if self._log is not None:
            self.look_s = Followed.look_s
        self.rows: HeldReader | HeldLog | HeldServers | EmbeddingStore = MemoryStore()
        try:
            restore_tables(self._saved, self.rows)
            self._record = VersionRecord(self._saved.job, self._saved.progress(), self._saved.dense())
        except BaseException:
            self.close()
            raise

    @contextmanager
    def current(self, taken: int) -> Iterator[tuple[int, VersionRecord | None]]:
        version = self._saved.version
        yield version, None if version == taken else self._record

    def advance(self) -> Versions:
        if self._log is not None:
            return self._followed(self._log)
        newest = open_checkpoint(self._place)
        if newest.address == self._saved.address:
            return self
        require_same_model(newest.job, self.job, self._place)
        return Saved(self._place, newest.version)

    def _followed(self, log: str) -> "Followed":
        found = Followed(log, self._deadline_s)
        try:
            require_same_model(found.job, self.job, log)
            if (now := found.rows.version()) < self._saved.version:
                raise StoreBroken(f"{log} is at version {now}, behind version {self._saved.version} of {self._place}")
        except BaseException:
            found.close()
            raise
        return found

    def newest(self) -> int:
        return open_checkpoint(self._place).version

    def close(self) -> None:
        self.rows.close()


class Followed:
    """The versions of a store that a job writes."""

    look_s: float | None = 0.02

    def __init__(self, url: str, deadline_s: float | None) -> None:
        self._place = redacted(url)
        self._reader = open_follower(url, deadline_s)
        self.rows: HeldReader | HeldLog | HeldServers | EmbeddingStore = self._reader
        try:
            with self._reader.at_one_version() as (_, record):
                self.job: DocumentFields = dict(self._record(record).job)
        except BaseException:
            self._reader.close()
            raise

    def _record(self, record: bytes | None) -> VersionRecord:
        if record is None:
            raise CheckpointError(f"{self._place} holds no version of a job yet: start one with --store {self._place}")
        return VersionRecord.from_bytes(record)

    @contextmanager
    def current(self, taken: int) -> Iterator[tuple[int, VersionRecord | None]]:
        with self._reader.at_one_version() as (version, record):
            found = None
            if version != taken:
                found = self._record(record)
                require_same_model(dict(found.job), self.job, self._place)
            yield version, found

    def advance(self) -> Versions:
        self._reader.advance()
        return self

    def newest(self) -> int:
        return self._reader.newest()

    def close(self) -> None:
        self._reader.close()


def require_same_model(found: DocumentFields, ours: DocumentFields, place: str | Path) -> None:
    if not same_model(found, ours):
        raise StoreBroken(
            f"{place} holds versions of job {found['job']} now, whose model is another one than that of {ours['job']}: "
            "open it anew"
        )


def open_versions(
    source: str | Path, version: int | None, checkpoints: str | Path | None, deadline_s: float | None
) -> Versions:
    """Those of `et.Predictor`, which says what the arguments are, at the version if one is named.

    Raises:
        CheckpointError: it cannot be read.
    """
    found = latest_of(source, version, deadline_s)
    if isinstance(found, Saved):
        return found
    with ExitStack() as undo:
        undo.callback(found.close)
        with found.current(-1) as (now, _):
            if version in (None, now):
                undo.pop_all()
                return found
    if checkpoints is None:
        raise no_such_version(version, now)
    return Saved(checkpoints, version)


def no_such_version(wanted: int | None, now: int) -> CheckpointError:
    """The error of a version that a store is not at."""
    return CheckpointError(
        f"version {wanted} cannot be read: the store is at version {now}, and has no other; name the job's checkpoints "
        "(--checkpoints DIR), or read these"
    )


def is_followed(source: str | Path) -> bool:
    """Whether it is a store that a job writes to, and no folder."""
    return str(source).partition("://")[0] in (*SCHEMES, "grpc") or str(source).startswith(("memory?", SERVERS))


def latest_of(source: str | Path, version: int | None, deadline_s: float | None) -> "Saved | Followed":
    """What a source has: its versions as they are saved, or those of the store that it is, or of its job's now.

    Raises:
        As `et.Predictor`.
    """
    if is_followed(source):
        return Followed(str(source), deadline_s)
    try:
        return Saved(source, version, deadline_s)
    except CheckpointError:
        if version is not None or (url := _store_of_run(Path(source))) is None:
            raise
        return Followed(url, deadline_s)


def _store_of_run(run: Path) -> str | None:
    """Where the rows of the job are that a run directory is of; None: it is not known, or the job is over."""
    try:
        address = str(json.loads((run / JOB_FILE).read_text())["address"])
    except UNREADABLE:
        return None
    with suppress(ElastableError), MasterClient(address, deadline_s=_ASKED_S) as master:
        servers = master.status().servers
        return SERVERS + ",".join(of.address for of in servers) if servers else f"grpc://{address}"
    return None


def model_of_job(job: DocumentFields, model_file: str | Path | None) -> keras.Model:
    """The model of a version, built, without rows.

    Raises:
        Unsupported: it was trained on another backend of Keras.
        ModelError: it cannot be made, or needs its model file.
    """
    if (trained_on := str(job.get("backend", ""))) not in ("", backend().name):
        raise Unsupported(f"the model was trained on Keras' {trained_on} backend: set KERAS_BACKEND={trained_on}")
    file = None if model_file is None else load_model_file(model_file)

    def records() -> Reader:
        found = None if file is None else file.reader("train") or file.reader("validation")
        if found is None:
            raise ModelError(
                "Keras builds the model on its first records only: name its model file (--model-file MODEL.py), with a "
                "data() that has some"
            )
        return found

    make = (lambda: model_of(str(job.get("model_config", "")))) if file is None else file.model
    with leaving_rows_out():
        return make_model(make, records, int(job["seed"]), int(job["offload_above"]), job.get("on_worker", ()))


def take_weights(model: keras.Model, dense: DenseTensors, rows: RowSource, record: VersionRecord) -> dict[str, Tensor]:
    """Makes a model that of a version, and gives its weights by key; `rows` are of that version, `dense` of the model.

    Raises:
        CheckpointError: a weight is missing.
    """
    weights = dense.weights(record.dense)
    for layer in store_layers(model):
        layer.attach(rows, int(record.job["seed"]))  # type: ignore[call-overload]
    for variable, value in zip(variables_of(model.weights), weights.values(), strict=True):
        backend().assign(variable, value)
    take_statistics(model._flatten_layers())
    return weights
