"""Two days of clicks: DAY is 1 or 2, or "both", as parts of one job; CHANGED makes another model of it."""

import os

import keras
import numpy as np

import elastable as et

COUNTS = {1: 202, 2: 149}  # each ends in a smaller micro-batch, and a smaller version


def model() -> keras.Model:
    changed = os.environ.get("CHANGED", "")
    words = keras.Input((3,), dtype="int64", name="word_ids")
    user = keras.Input((), dtype="int64", name="user")
    said = et.Embedding(
        None, 8 if changed == "dim" else 4, name="words", combiner="sum", admission=et.AdmissionSpec(2, 1 << 12),
        eviction=et.EvictionSpec(max_age=9, every=3),
    )  # fmt: skip
    parts = [said(words), et.Embedding(40, 4, name="users", lazy=False)(user)]
    joined = keras.layers.Concatenate()(parts)
    joined = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization(name="norm")(joined))
    joined = keras.layers.Dense(8, "relu", name="joined" if changed == "table" else "hidden")(joined)
    if changed == "table":
        joined = keras.layers.Add()([joined, et.Embedding(40, 8, name="places")(user)])
    made = keras.Model([words, user], keras.layers.Dense(1, "sigmoid", name="out")(joined))
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.9)
    optimizer = keras.optimizers.RMSprop(0.1) if changed == "optimizer" else keras.optimizers.Adam(rate)
    made.compile(optimizer, "binary_crossentropy", metrics=["mae"])
    return made


def day(number: int) -> et.NumpyReader:
    random, count = np.random.default_rng(number), COUNTS[number]
    x = {"word_ids": random.integers(0, 60, (count, 3)), "user": random.integers(0, 40, count)}
    return et.NumpyReader(x, (x["user"] % 2).astype("float32"))


def data(split: str) -> object:
    if split != "train":
        return None
    days = os.environ["DAY"]
    return et.PartsReader([day(1), day(2)]) if days == "both" else day(int(days))
