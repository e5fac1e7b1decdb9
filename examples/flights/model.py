"""Will this flight arrive more than 15 minutes late? Predicted before it departs.

    elastable train examples/flights/model.py --workers 2 \
        --micro-batch-size 512 --grads-to-wait 2 --epochs 1

A factorization machine and a small network over crosses of the schedule's
columns: some 300,000 rows in 15 tables. A cross of integers is one integer, and
a table takes any int64, so nothing is hashed and nothing collides.

One epoch is enough: most rows are crosses with the date, seen a few times
each, and a second epoch overfits to those few flights.
"""

from __future__ import annotations

import keras
import numpy as np
from columns import COLUMNS, load
from keras import layers, ops

import elastable as et

DIM = 8

CROSSES = {
    "on_weekday": ("weekday",),
    "plane": ("tailnum",),
    "line": ("carrier", "flight", "origin"),
    "route": ("carrier", "origin", "dest"),
    "into": ("dest", "arrival_hour"),
    "out_of": ("carrier", "origin", "departure_hour"),
    "on_date": ("date",),
    "date_origin": ("date", "origin"),
    "date_carrier": ("date", "carrier"),
    "date_dest": ("date", "dest"),
    "date_plane": ("date", "tailnum"),
}

# Delays come in waves, so flights that leave at nearly the same time share
# rows: name -> (what is crossed with the time window, the window's minutes).
WINDOWS = {
    "date_origin_1h": (("date", "origin"), 60),
    "date_origin_3h": (("date", "origin"), 180),
    "date_carrier_4h": (("date", "carrier"), 240),
    "date_dest_4h": (("date", "dest"), 240),
}


def data(split: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The columns of a split, int32 `[flights]` each, and whether each flight was late."""
    return load(split)


def model() -> keras.Model:
    """The compiled model, from plain integer columns to the probability of being late."""
    inputs = {name: keras.Input((), name=name, dtype="int64") for name in COLUMNS}
    hours = {f"{time}_hour": inputs[time] // 60 for time in ("departure", "arrival")}
    known = {**inputs, **hours, "weekday": inputs["date"] % 7}

    fields = [embedding(name)(cross(*(known[part] for part in parts))) for name, parts in CROSSES.items()]
    for name, (parts, minutes) in WINDOWS.items():
        key = cross(*(known[part] for part in parts))
        fields.append(embedding(name, combiner="sum")(windows(key, known["departure"], minutes)))

    stacked = ops.stack(fields, axis=1)  # [flights, fields, DIM]
    total = ops.sum(stacked, axis=1)
    pairs = (total * total - ops.sum(stacked * stacked, axis=1)) / 2  # of all fields, by the binomial formula
    numbers = [ops.cast(known[name], "float32") for name in ("date", "departure", "arrival", "distance")]
    scaled = layers.BatchNormalization(momentum=0.9)(ops.stack(numbers, axis=1))
    hidden = layers.Dense(32, activation="relu")(layers.Concatenate()([*fields, pairs, scaled]))
    logit = layers.Dense(1)(hidden) + ops.sum(pairs, axis=1, keepdims=True)

    flights = keras.Model(inputs, layers.Activation("sigmoid", name="late")(logit), name="flights")
    flights.compile(
        # A small initial accumulator: a row that is seen three times must learn from the first.
        optimizer=keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-8),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(num_thresholds=1000, name="auc")],
    )
    return flights


def embedding(name: str, combiner: str | None = None) -> keras.layers.Layer:
    """A layer with a separate table, for any int64 ids."""
    initializer = keras.initializers.RandomUniform(-0.01, 0.01)
    return et.Embedding(None, DIM, embeddings_initializer=initializer, combiner=combiner, name=name)


def cross(*parts: keras.KerasTensor) -> keras.KerasTensor:
    """int64 `[flights]`: one id for each combination of the parts, as digits in base 2**14."""
    ids = parts[0]
    for part in parts[1:]:
        ids = ids * 2**14 + part
    return ids


def windows(key: keras.KerasTensor, time: keras.KerasTensor, minutes: int) -> keras.KerasTensor:
    """Ids `[flights, 2]` of the two windows, each `minutes` long and overlapping by half, that hold `time`."""
    half = time // (minutes // 2)
    return ops.stack([cross(key, half), cross(key, half + 1)], axis=1)
