"""The click model of `benchmarks/click.py`, for plain Keras and Elastable.

A model file: `python -m elastable master benchmarks/click_job/model.py` trains it, too. Environment
variables set the size of the table (CLICK_ROWS) and its optimizer
(CLICK_OPTIMIZER), on which the master and its worker must agree.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

import elastable as et
from benchmarks.click_job.sizes import BATCH, DIM, FEATURES
from elastable.worker.readers import Batch, Reader

__all__ = ["batches", "click_model", "data", "model"]

_HIDDEN = (256, 128)
_POOL = 64  # different batches, drawn beforehand; they are used in turn
_ENDLESS = 1_000_000  # batches in an epoch: more than a benchmark sees


def click_model(embedding: Any, optimizer: str) -> keras.Model:
    """The compiled model: one table for all features, then an MLP.

    Args:
        embedding: The layer; `[BATCH, FEATURES]` ids to `[BATCH, FEATURES, DIM]`.
        optimizer: Its class among `keras.optimizers`.
    """
    ids = keras.Input((FEATURES,), name="ids", dtype="int64")
    hidden = keras.layers.Flatten()(embedding(ids))
    for width in _HIDDEN:
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    clicks = keras.Model(ids, keras.layers.Dense(1)(hidden), name="clicks")
    clicks.compile(getattr(keras.optimizers, optimizer)(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    return clicks


@lru_cache(maxsize=1)
def batches(rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Ids int64 `[pool, BATCH, FEATURES]`, uniform over the table, and clicks float32 `[pool, BATCH, 1]`."""
    random = np.random.default_rng(2026)
    ids = random.integers(0, rows, (_POOL, BATCH, FEATURES), dtype=np.int64)
    return ids, random.integers(0, 2, (_POOL, BATCH, 1)).astype(np.float32)


class _Batches(Reader):
    """Gives whole batches that were drawn beforehand: a step costs no reading."""

    def __init__(self, rows: int) -> None:
        self._ids, self._clicks = batches(rows)

    def __len__(self) -> int:
        return _ENDLESS * BATCH

    @property
    def shuffle_block(self) -> int:
        """Batches are read whole."""
        return BATCH

    def take(self, indices: npt.NDArray[np.int64]) -> Batch:
        """The batch that the first index lies in; of fewer records where fewer are asked for."""
        batch = int(indices[0]) // BATCH % _POOL
        return self._ids[batch][: len(indices)], self._clicks[batch][: len(indices)]


def model() -> keras.Model:
    """The model with its table in a store."""
    return click_model(et.Embedding(_rows(), DIM, name="features"), os.environ["CLICK_OPTIMIZER"])


def data(split: str) -> Reader | None:
    """Endless training records, and nothing to validate on."""
    return _Batches(_rows()) if split == "train" else None


def _rows() -> int:
    return int(os.environ["CLICK_ROWS"])
