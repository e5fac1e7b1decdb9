"""The click model of `benchmarks/jobs/click.py`, for plain Keras and Elastable.

A model file: `python -m elastable master benchmarks/click_job/model.py` trains it, too. Environment
variables set the rows of its tables together (CLICK_ROWS), the optimizer (CLICK_OPTIMIZER), how ids are drawn
(CLICK_IDS), whether all features share one table or each has its own (CLICK_TABLES) and the examples of a batch
(CLICK_BATCH), on which the master and its workers must agree.
"""

import os
from collections.abc import Sequence

import keras
import numpy as np
import numpy.typing as npt

import elastable as et
from benchmarks.click_job.draws import batches
from benchmarks.click_job.sizes import BATCH, DIM, FEATURES, HIDDEN, LEARNING_RATE
from elastable.worker.readers.batch.reader import Batch, Reader

_ENDLESS = 1_000_000  # batches in an epoch: more than a benchmark sees


def click_model(embeddings: Sequence[keras.Layer], optimizer: str) -> keras.Model:
    """The compiled model: tables, then an MLP.

    Args:
        embeddings: One layer for all features, or one for each; `[batch, n]` ids to `[batch, n, DIM]`.
        optimizer: Its class among `keras.optimizers`.
    """
    ids = keras.Input((FEATURES,), name="ids", dtype="int64")
    if len(embeddings) == 1:
        hidden = keras.layers.Flatten()(embeddings[0](ids))
    else:
        hidden = keras.layers.Concatenate()([table(ids[:, field]) for field, table in enumerate(embeddings)])
    for width in HIDDEN:
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    clicks = keras.Model(ids, keras.layers.Dense(1)(hidden), name="clicks")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    clicks.compile(getattr(keras.optimizers, optimizer)(LEARNING_RATE), loss)
    return clicks


class _Batches(Reader):
    """Gives whole batches that were drawn beforehand: a step costs no reading."""

    def __init__(self, rows: int) -> None:
        self._batch = self.shuffle_block = int(os.environ.get("CLICK_BATCH", str(BATCH)))  # batches are read whole
        self._ids, self._clicks = batches(rows, os.environ.get("CLICK_IDS", "uniform"), self._batch)

    def __len__(self) -> int:
        return _ENDLESS * self._batch

    def take(self, indices: npt.NDArray[np.int64]) -> Batch:
        """The batch that the first index lies in; of fewer records where fewer are asked for."""
        batch = int(indices[0]) // self._batch % len(self._ids)
        return self._ids[batch][: len(indices)], self._clicks[batch][: len(indices)]


def model() -> keras.Model:
    """The model with its tables in a store."""
    count, rows = _tables(), _rows_a_table()
    names = ["features"] if count == 1 else [f"feature_{number}" for number in range(count)]
    tables = [et.Embedding(rows, DIM, name=name) for name in names]
    return click_model(tables, os.environ["CLICK_OPTIMIZER"])


def data(split: str) -> Reader | None:
    """Endless training records, and nothing to validate on."""
    return _Batches(_rows_a_table()) if split == "train" else None


def _rows_a_table() -> int:
    return int(os.environ["CLICK_ROWS"]) // _tables()


def _tables() -> int:
    return int(os.environ.get("CLICK_TABLES", "1"))
