"""Keras' optimizers as numba kernels, one module a family, lazily over rows.

Formulas, defaults and hyperparameter names are those of Keras 3.15
(`keras/src/optimizers/*.py`), operation by operation in float32, so that on
rows that have a gradient at every step the numbers are Keras' own.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastable.embedding_store.optimizers.base import Factory
from elastable.embedding_store.optimizers.fused.adadelta import Adadelta
from elastable.embedding_store.optimizers.fused.adagrad import Adagrad
from elastable.embedding_store.optimizers.fused.adam import Adam, AdamW
from elastable.embedding_store.optimizers.fused.adamax import Adamax
from elastable.embedding_store.optimizers.fused.ftrl import Ftrl
from elastable.embedding_store.optimizers.fused.lion import Lion
from elastable.embedding_store.optimizers.fused.nadam import Nadam
from elastable.embedding_store.optimizers.fused.rmsprop import RMSprop
from elastable.embedding_store.optimizers.fused.rowwise_adagrad import RowwiseAdagrad
from elastable.embedding_store.optimizers.fused.sgd import SGD

__all__ = ["FUSED"]

FUSED: Mapping[str, Factory] = {
    "adadelta": Adadelta,
    "adagrad": Adagrad,
    "adam": Adam,
    "adamax": Adamax,
    "adamw": AdamW,
    "ftrl": Ftrl,
    "lion": Lion,
    "nadam": Nadam,
    "rmsprop": RMSprop,
    "rowwise_adagrad": RowwiseAdagrad,
    "sgd": SGD,
}
