"""`et.fit`: a whole job in the current process, with a store of its own."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from rich.console import Console

from elastable.backup import backed_up_epoch, refuse_backup_of_slots
from elastable.best_versions import BestVersions
from elastable.callbacks import JobCallbacks
from elastable.embedding_store.errors import BadInput, ElastableError
from elastable.embedding_store.locations import LocationSettings, plan_tables, storage_of_tables
from elastable.embedding_store.memory.store import MemoryStore
from elastable.embedding_store.spec import TableSpec
from elastable.embedding_store.store import EmbeddingStore
from elastable.freezing import Freezing
from elastable.job_hooks import JobHooks
from elastable.master.api import JobSpec, TaskKind, WorkerIdentity
from elastable.master.core import Master
from elastable.master.dense import DenseState
from elastable.master.discovery import discover_tables
from elastable.master.hooks import MasterOptions
from elastable.master.keras_optimizer import accumulated_by
from elastable.master.metrics import MetricBook
from elastable.master.progress import Progress
from elastable.master.schedule import Schedule
from elastable.places import join_stores, on_worker
from elastable.progress import JobProgress
from elastable.tables_in_store import note_trained, tables_in_store
from elastable.worker.build import build_model, sample_batch
from elastable.worker.compute import MicroBatchComputer
from elastable.worker.loop import Worker
from elastable.worker.offload import offload_built
from elastable.worker.on_worker import keep_on_worker
from elastable.worker.readers import Reader, as_reader

__all__ = ["fit"]

_BATCH_RECORDS = 32  # as in Keras


def fit(
    model: Any,
    data: Any,
    *,
    epochs: int = 1,
    initial_epoch: int = 0,
    batch_size: int | None = None,
    grads_to_wait: int | None = None,
    average: str = "mean",
    validation_data: Any = None,
    evaluate_every: int = 0,
    callbacks: Sequence[Any] = (),
    shuffle: bool = True,
    seed: int = 0,
    store: EmbeddingStore | Mapping[str, EmbeddingStore] | None = None,
    locations: LocationSettings | None = None,
    offload_embeddings_above: int = 0,
    lazy: bool = True,
    not_finite: str = "refuse",
    verbose: bool = True,
) -> Any:
    """Trains a compiled Keras model whose embedding tables live in a store, in this process.

    Afterwards the model's embedding layers read from the store, so that
    `model.predict`, `model.evaluate` and `model.save` work as usual. Calling
    it again goes on from where it ended: tables, optimizer and all. The order
    of the records belongs to (seed, epoch), so a second call passes
    `initial_epoch`, as in Keras, or another seed: then `epochs=4` is to the bit
    `epochs=2` followed by `epochs=4, initial_epoch=2`.

    Args:
        model: A compiled Keras model with `et.Embedding` layers.
        data: (x, y), (x, y, sample_weight), or a reader; or a batched `tf.data.Dataset`, a
            `keras.utils.PyDataset` or a torch `DataLoader`, read once, as `StreamReader` says; one
            without an end in an `EndlessReader`.
        epochs: The epoch to end at, counted from 0: passes over the data, less `initial_epoch`.
        initial_epoch: The epoch to begin at.
        batch_size: Records in a micro-batch; None: as many as in a stream's first batch, else 32.
        grads_to_wait: Micro-batches of one update; None: as the optimizer's gradient_accumulation_steps says, else 1.
        average: How they are combined. "mean": with the numbers of plain Keras on one batch of all their records,
            whatever the loss is divided by; a loss of which that cannot be seen is refused. "records": each weighs its
            records. "batches": all weigh the same, as with Keras' gradient_accumulation_steps. "sum": each weighs 1.
        validation_data: As `data`; evaluated after every epoch.
        evaluate_every: Versions between further evaluations, within epochs; 0: none.
        callbacks: Keras callbacks.
        shuffle: Whether records are shuffled, by `seed`.
        seed: Of the record order, initial rows and dropout.
        store: Where the tables live; None: in this process's memory. With
            `locations` it may be several: "memory", "file" or "redis" -> store.
        locations: Which tables live where; None: all in the (first) store.
        offload_embeddings_above: Plain `keras.layers.Embedding` layers of more
            elements than this move to the store, with their values; 0: none.
        lazy: Whether a step moves only the rows that its batch touches; False: momentum
            and decay move all rows, with the numbers of plain Keras, at about the
            same cost (docs/lazy.md). A layer's own `lazy` goes before.
        not_finite: "refuse" gradients with NaN or Inf (an error), or "skip" them.
        verbose: Whether progress is shown.

    Returns:
        `keras.callbacks.History`, with `val_...` entries for the validation data; its attribute `evaluations` is a
        list with a dict for each evaluation within an epoch: `version` and `val_...`.

    Raises:
        ElastableError: data, model, callbacks or settings that cannot be used.
    """
    if evaluate_every < 0 or (evaluate_every and validation_data is None):
        raise BadInput(
            f"evaluate_every={evaluate_every}: need a number of versions, and validation_data to evaluate on"
        )
    initial_epoch = backed_up_epoch(callbacks, initial_epoch)
    if not 0 <= initial_epoch < epochs:
        raise BadInput(f"initial_epoch={initial_epoch}, epochs={epochs}: need 0 <= initial_epoch < epochs")
    reader = as_reader(data, streams=True, endless=True)
    validation = None if validation_data is None else as_reader(validation_data, streams=True)
    if batch_size is None:
        batch_size = getattr(reader, "batch_records", _BATCH_RECORDS)
    sample = sample_batch(reader)
    build_model(model, sample)
    moved = offload_built(model, offload_embeddings_above)
    batches = -(-len(reader) // batch_size)
    grads_to_wait, average = accumulated_by(model.optimizer, batches, grads_to_wait, average)
    job = JobSpec(
        job=uuid.uuid4().hex[:12],
        micro_batch_size=batch_size,
        grads_to_wait=grads_to_wait,
        average=average,
        epochs=epochs,
        seed=seed,
        train_records=len(reader),
        validation_records=0 if validation is None else len(validation),
        shuffle=shuffle,
        not_finite=not_finite,
    )
    tables = discover_tables(model, seed, lazy=lazy)
    schedule = Schedule(job)
    # A job counts its versions from epoch 0, also where the rows are older.
    start = (
        Progress(schedule.versions_per_epoch * initial_epoch, evaluated=True, records=len(reader) * initial_epoch)
        if initial_epoch
        else Progress()
    )
    stores, places = _stores_and_places(store, locations, tables)
    keep_on_worker(model, {name: tables[name] for name in on_worker(places)}, moved)
    tables = {name: spec for name, spec in tables.items() if places[name] != "worker"}
    held = tables_in_store(model, tables, join_stores(stores, places), moved, seed, start.version)
    dense = DenseState(model)
    # The worker shares the model with the master: it cannot hold another version's variables meanwhile.
    options = MasterOptions(evaluate_every=evaluate_every, evaluate_beside=False)
    master = Master(job, held, dense, MetricBook(model), start=start, options=options)
    readers: dict[TaskKind, Reader] = {TaskKind.TRAIN: reader}
    if validation is not None:
        readers[TaskKind.EVALUATE] = validation
    computer = MicroBatchComputer(model, job, readers, sample, held, tables)
    refuse_backup_of_slots(callbacks, model, tables)
    best = BestVersions(callbacks, held, dense, job, master.progress)
    freezing = Freezing(model, dense)
    joined = JobCallbacks(callbacks, model, epochs, schedule.versions_per_epoch, freezing, best, in_job=False)
    progress = JobProgress(Console(quiet=not verbose), len(reader) * epochs)
    evaluations: list[dict[str, float]] = []

    def evaluated(version: int, logs: Mapping[str, float]) -> None:
        evaluations.append({"version": version, **logs})
        progress.evaluation(version, logs)

    hooks = JobHooks(
        joined,
        schedule,
        master.stop,
        told=lambda epoch, logs: progress.epoch(epoch, epochs, logs),
        evaluated=evaluated,
    )
    with closing(best):
        joined.begin()
        note_trained(model)  # a callback may have loaded weights
        try:
            with progress, _worker_beside(master, computer, held), _shown(master, progress):
                master.run(hooks)
        finally:
            # The end may find the worker within a micro-batch, which moves the states of the model that both share.
            dense.rewind()
        joined.end(hooks.logs)
    joined.history.evaluations = sorted(evaluations, key=lambda entry: entry["version"])
    return joined.history


def _stores_and_places(
    store: EmbeddingStore | Mapping[str, EmbeddingStore] | None,
    locations: LocationSettings | None,
    tables: Mapping[str, TableSpec],
) -> tuple[dict[str, EmbeddingStore], dict[str, str]]:
    """Storage -> store, and table -> storage."""
    stores = dict(store) if isinstance(store, Mapping) else {"memory": MemoryStore() if store is None else store}
    if not stores:
        raise BadInput("store={}: give at least one store, or None")
    if locations is not None:
        return stores, storage_of_tables(plan_tables(tables, locations))
    return stores, dict.fromkeys(tables, next(iter(stores)))


@contextmanager
def _worker_beside(master: Master, computer: MicroBatchComputer, store: EmbeddingStore) -> Iterator[None]:
    """A worker in a thread; callbacks stay in the caller's."""
    identity = WorkerIdentity(uuid.uuid4().hex, socket.gethostname(), os.getpid())
    worker = Worker(master, computer, store, master.join(identity), identity)

    def work() -> None:
        try:
            worker.run()
        except ElastableError:
            # The worker has told the master, whose run() raises it in the caller's thread.
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, run() must raise it and not wait
            master.report_failure(identity.incarnation, error, fatal=True)

    thread = threading.Thread(target=work, name="elastable-worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(timeout=30.0)


@contextmanager
def _shown(master: Master, progress: JobProgress) -> Iterator[None]:
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            progress.show(master.status())

    thread = threading.Thread(target=look, name="elastable-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5.0)
