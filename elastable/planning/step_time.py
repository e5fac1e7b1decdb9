"""A model's micro-batch, tried here: how long a worker computes it, and how many rows it needs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import ModelError
from elastable.master.api import JobSpec, Task, TaskKind
from elastable.planning.sizing import JobShape
from elastable.worker.models.build import for_model, sample_batch
from elastable.worker.models.model_file import load_model_file
from elastable.worker.runtime.compute import MicroBatchComputer

__all__ = ["job_shape"]

_STEPS = 8
_WARM_STEPS = 2


def job_shape(
    model_file: Path,
    model: keras.Model,
    tables: Mapping[str, TableSpec],
    micro_batch_size: int,
    table_bytes: int,
) -> JobShape:
    """Computes some micro-batches of training data, and measures.

    Args:
        model_file, model: The file, and its built model.
        tables: Of the model.
        micro_batch_size: Examples of a micro-batch.
        table_bytes: Of all their rows, with slots.

    Raises:
        ElastableError: the data or the model cannot be used.
    """
    reader = load_model_file(model_file).reader("train")
    if reader is None:
        raise ModelError(f"{model_file}: data('train') returned None; there is nothing to try")
    reader = for_model(reader, model)
    records = len(reader)
    size = min(micro_batch_size, records)
    job = JobSpec(job="plan", micro_batch_size=size, train_records=records, intra_op_threads=1)
    with MemoryStore(1) as store:
        computer = MicroBatchComputer(model, job, {TaskKind.TRAIN: reader}, sample_batch(reader, model), store, tables)
        took, rows = [], []
        for number in range(_STEPS):
            start = number * size % max(1, records - size + 1)
            prepared = computer.prepare(Task(0, TaskKind.TRAIN, number, 0, start, start + size))
            values = {
                name: np.zeros((len(ids), tables[name].dim), np.float32) for name, ids in prepared.ids.unique.items()
            }
            began = time.perf_counter()
            computer.train(prepared, values)
            took.append(time.perf_counter() - began)
            rows.append({name: len(ids) for name, ids in prepared.ids.unique.items()})
    middle = {name: statistics.median(each[name] for each in rows) for name in rows[0]}
    return JobShape(
        examples=size,
        rows=sum(middle.values()),
        values=sum(count * tables[name].dim for name, count in middle.items()),
        dense=sum(int(np.prod(variable.shape)) for variable in variables_of(model.trainable_variables)),
        step_s=statistics.median(took[_WARM_STEPS:]),
        table_bytes=table_bytes,
    )
