"""The model file of the chaos suite: small, with every kind of state that a fault could tear."""

import os
import time

import keras
import numpy as np

import elastable as et
from elastable.worker.readers.batch.reader import Batch
from tests.chaos.records import ACCUMULATOR, BETA_1, MOMENTUM, RATE, RHO, records_of


def _falling() -> keras.optimizers.schedules.ExponentialDecay:
    return keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)


_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(RATE),
    "adagrad": lambda: keras.optimizers.Adagrad(RATE, initial_accumulator_value=ACCUMULATOR),
    "adam": lambda: keras.optimizers.Adam(_falling(), beta_1=BETA_1),
    "adamw": lambda: keras.optimizers.AdamW(_falling(), beta_1=BETA_1),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=MOMENTUM),
    "rmsprop": lambda: keras.optimizers.RMSprop(_falling(), rho=RHO),
}


def data(split: str) -> object:
    """See `tests.chaos.records`; reading takes CHAOS_PAUSE seconds a micro-batch longer."""
    x, y = records_of(split)
    return _SlowReader(x, y)


class _SlowReader(et.NumpyReader):
    def take(self, indices: np.ndarray) -> Batch:
        time.sleep(float(os.environ.get("CHAOS_PAUSE", "0")))
        return super().take(indices)


def _loss(wanted: keras.KerasTensor, given: keras.KerasTensor) -> keras.KerasTensor:
    # The second column is the record's own row: its gradient is one over the records of the micro-batch.
    return keras.ops.mean(keras.ops.square(wanted[:, 0] - given[:, 0]) + given[:, 1])


def _error(wanted: keras.KerasTensor, given: keras.KerasTensor) -> keras.KerasTensor:
    return keras.ops.abs(wanted[:, 0] - given[:, 0])


def model() -> keras.Model:
    """Three tables, BatchNormalization, Dropout and two dense layers."""
    inputs = {
        "own": keras.Input((), dtype="int64", name="own"),
        "user": keras.Input((), dtype="int64", name="user"),
        "words": keras.Input((3,), dtype="int64", name="words"),
    }
    own = et.Embedding(None, 1, embeddings_initializer="zeros", name="counted")(inputs["own"])
    user = et.Embedding(40, 4, name="users")(inputs["user"])
    said = et.Embedding(None, 3, name="words_said", combiner="mean")(inputs["words"])
    joined = keras.layers.Concatenate()([user, said])
    hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(joined))
    deep = keras.layers.Dense(1)(keras.layers.Dense(6, "tanh")(hidden))
    made = keras.Model(inputs, keras.layers.Concatenate()([deep, own]))
    made.compile(_OPTIMIZERS[os.environ["CHAOS_OPTIMIZER"]](), _loss, metrics=[_error])
    return made
