"""The two ways a case's program is run: by plain Keras, and with its embedding tables in a store."""

import functools
from dataclasses import dataclass
from typing import Any, TypedDict

import keras
import numpy as np
import tensorflow as tf

import elastable as et
from tests.untyped import Keyword

RECORDS, BATCH, LENGTH, DIM = 24, 8, 3, 4


class Outcome(TypedDict):
    """What a program came to: its weights by layer, and the history by name."""

    weights: dict[str, list[np.ndarray]]
    history: dict[str, list[float] | list[np.ndarray]]


@dataclass(frozen=True)
class Side:
    """How a program is run. Programs are written once, and take a side.

    Attributes:
        stored: Whether tables live in a store: `keras.layers.Embedding` layers are offloaded by `et.fit`.
        lazy: As `et.fit` takes it.
        dense: Plain Keras with dense gradients of its tables, for what it cannot do with sparse ones.
        every_row: Whether each batch touches every row of the table; otherwise it leaves a fifth of them.
    """

    stored: bool = False
    lazy: bool = True
    dense: bool = False
    every_row: bool = False

    @property
    def vocabulary(self) -> int:
        """Rows of the table. A batch has 24 ids, each once: Keras squares repeated ids one by one (docs/fit.md)."""
        return BATCH * LENGTH if self.every_row else 30

    @property
    def x(self) -> np.ndarray:
        """int64 [24, 3]."""
        random = np.random.default_rng(0)
        batches = [random.permutation(self.vocabulary)[: BATCH * LENGTH] for _ in range(RECORDS // BATCH)]
        return np.concatenate(batches).reshape(RECORDS, LENGTH)

    @property
    def y(self) -> np.ndarray:
        """float32 [24, 1]."""
        return np.random.default_rng(1).normal(size=(RECORDS, 1)).astype(np.float32)

    @property
    def labels(self) -> np.ndarray:
        """float32 [24, 1] of 0 and 1."""
        return (self.y > 0).astype(np.float32)

    @property
    def weights(self) -> np.ndarray:
        """float32 [24]: a weight of each record."""
        return np.random.default_rng(2).uniform(0.5, 2.0, RECORDS).astype(np.float32)

    def embedding(self, *arguments: Any, **options: Keyword) -> keras.layers.Layer:
        """`keras.layers.Embedding`, or `et.Embedding` with the same arguments."""
        return (et.Embedding if self.stored else keras.layers.Embedding)(*arguments, **options)

    def fit(self, model: keras.Model, *data: Any, **options: Keyword) -> keras.callbacks.History:
        """`model.fit`, or `et.fit` with the same arguments; with `grads_to_wait` in as many micro-batches a batch."""
        options = {"shuffle": False, "verbose": 0, **options}
        if "batch_size" not in options and (not data or isinstance(data[0], np.ndarray | dict | tuple | list)):
            options["batch_size"] = BATCH
        together = options.pop("grads_to_wait", 1)
        if not self.stored:
            return model.fit(*data, **options)
        if together > 1:
            options.update(grads_to_wait=together, batch_size=options["batch_size"] // together)
        return et.fit(model, *data, **options, lazy=self.lazy, offload_embeddings_above=1)


class MeanError:
    """A `compute_loss` that has no `self.losses` in it."""

    def compute_loss(
        self, x: object, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: object = None, training: bool = True
    ) -> tf.Tensor:
        return keras.ops.mean(keras.ops.abs(y - y_pred))


class OwnLoss(MeanError, keras.Model):
    """For functional models alone: Keras changes the bases of their class."""


def small(side: Side, units: int = 1, activation: str | None = None, **embedding: Keyword) -> keras.Model:
    """ids [3] -> an embedding -> a dense layer."""
    table = keras.layers.Embedding(side.vocabulary, DIM, name="items", **embedding)
    return around(table, keras.layers.Flatten(), keras.layers.Dense(units, activation, name="out"))


def around(*layers: keras.layers.Layer, dtype: str = "int64", kind: type[keras.Model] = keras.Model) -> keras.Model:
    ids = keras.Input((LENGTH,), dtype=dtype, name="ids")
    return kind(ids, functools.reduce(lambda value, layer: layer(value), layers, ids))


def flat(side: Side, *layers: keras.layers.Layer) -> keras.Model:
    """ids [3] -> a plain embedding -> the layers -> a dense layer of one unit."""
    table = keras.layers.Embedding(side.vocabulary, DIM, name="items")
    return around(table, keras.layers.Flatten(), *layers, keras.layers.Dense(1, name="out"))


def trained(
    side: Side,
    model: keras.Model | None = None,
    x: object = None,
    y: object = None,
    fit: Any = None,
    **compiled: object,
) -> Outcome:
    """Compiles with `compiled`, trains with `fit`, and gives what came out."""
    model = small(side) if model is None else model
    options = {"optimizer": keras.optimizers.SGD(0.5), "loss": "mse", "run_eagerly": True, **compiled}
    model.compile(**options)
    history = side.fit(model, side.x if x is None else x, side.y if y is None else y, **(fit or {}))
    return outcome(model, history)


def outcome(model: keras.Model, history: keras.callbacks.History | None = None) -> Outcome:
    weights = {}
    for layer in model._flatten_layers(include_self=False, recursive=True):
        variables = [np.asarray(variable) for variable in layer._trainable_variables + layer._non_trainable_variables]
        if hasattr(layer, "table_spec") and not layer.on_worker:
            variables.insert(0, layer.read_rows(np.arange(layer.input_dim)))
        if variables:
            weights[layer.name] = variables
    return {"weights": weights, "history": {} if history is None else dict(history.history)}
