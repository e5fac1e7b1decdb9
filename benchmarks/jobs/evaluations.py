"""The cost of frequent evaluation: a job that evaluates every version, compared with the same job without.

A master and two workers in one process, with a small Keras model. The figure is
micro-batches per second, trained and evaluated ones together: an evaluated
one should take no longer than a trained one, even if training has to wait
because evaluations are requested faster than workers run them.

    python -m benchmarks.jobs.evaluations
"""

import threading
import time
from collections.abc import Mapping
from functools import partial

import keras
import numpy as np

from benchmarks.harness import compare, interleaved, publish
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.master.api import JobSpec, TaskKind, WorkerIdentity
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.model.dense import DenseState
from elastable.master.model.discovery import create_tables, discover_tables
from elastable.master.model.model_metrics import ModelMetrics
from elastable.worker.layers.embedding import Embedding
from elastable.worker.readers.batch.reader import Batch, Reader
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.runtime.loop import Worker
from elastable.worker.user_model.build import build_model, sample_batch

_RECORDS, _HELD_OUT, _MICRO_BATCH, _WORKERS = 1_280, 256, 16, 2
_WARM, _TIMED, _ROUNDS = 20, 100, 5  # versions; the first of them compile
_FLOOR = 0.8


def main() -> None:
    """Measures, prints and writes `results/evaluations.json`."""
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(2026)
    ids = random.integers(0, 10_000, (_RECORDS, 8))
    labels = (ids.sum(axis=1) % 2).astype(np.float32)
    reader, held_out = NumpyReader(ids, labels), NumpyReader(ids[:_HELD_OUT], labels[:_HELD_OUT])
    rounds = interleaved({"every": partial(_rate, reader, held_out, 1), "never": partial(_rate, reader, held_out, 0)},
                         _ROUNDS)  # fmt: skip
    name = "micro-batches trained and evaluated, every version evaluated, against trained alone"
    row = compare(name, "micro-batches/s", rounds["every"], rounds["never"], _FLOOR)
    publish("evaluations", f"Frequent evaluation: {_WORKERS} workers, {_MICRO_BATCH} records a micro-batch", [row])


def _model(sample: Batch) -> keras.Model:
    inputs = keras.Input((8,), dtype="int64")
    rows = keras.layers.Flatten()(Embedding(10_000, 16, name="items")(inputs))
    hidden = keras.layers.Dense(64, activation="relu")(rows)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy", metrics=["AUC"])
    build_model(model, sample)
    return model


class _Watch(Hooks):
    """Times the versions behind the first ones, and ends the job."""

    def __init__(self) -> None:
        self.master: Master | None = None
        self.began = self.ended = 0.0

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version == _WARM:
            self.began = time.perf_counter()
        elif version == _WARM + _TIMED:
            self.ended = time.perf_counter()
            assert self.master is not None
            self.master.stop("measured")


def _rate(reader: Reader, held_out: Reader, evaluate_every: int) -> float:
    """Micro-batches a second, of a job of its own."""
    sample = sample_batch(reader)
    model = _model(sample)
    job = JobSpec(job="bench", micro_batch_size=_MICRO_BATCH, grads_to_wait=_WORKERS, epochs=100,
                  train_records=len(reader), validation_records=len(held_out))  # fmt: skip
    tables = discover_tables(model, 0)
    with MemoryStore() as store:
        create_tables(store, tables)
        options = MasterOptions(evaluate_every=evaluate_every)
        master = Master(job, store, DenseState(model), ModelMetrics(model), options=options)
        workers = []
        for number in range(_WORKERS):
            readers = {TaskKind.TRAIN: reader, TaskKind.EVALUATE: held_out}
            computer = MicroBatchComputer(_model(sample), job, readers, sample, store, tables)
            identity = WorkerIdentity(f"worker {number}")
            worker = Worker(master, computer, store, master.join(identity), identity)
            workers.append(threading.Thread(target=worker.run))
        for thread in workers:
            thread.start()
        watch = _Watch()
        watch.master = master
        master.run(watch)
        for thread in workers:
            thread.join()
    evaluated = -(-len(held_out) // _MICRO_BATCH) if evaluate_every else 0
    return _TIMED * (_WORKERS + evaluated) / (watch.ended - watch.began)


if __name__ == "__main__":
    main()
