"""A model file that trains on events of Redis Streams (EVENTS: their server), or counts them.

With COUNT each event adds exactly 1 to the row of its number, in whatever order and cut it is trained. HOLD,
HOLD_AT: as of `click_job`.
"""

import json
import os
from collections.abc import Iterable

import keras
import numpy as np
import redis

import elastable as et
from tests.elastable.click_job import callbacks as callbacks

KEYS = ["clicks", "more"]
COUNT = "COUNT" in os.environ


def model() -> keras.Model:
    number = keras.Input((), dtype="int64", name="number")
    if COUNT:
        trained = keras.Model({"number": number}, et.Embedding(None, 1, "zeros", name="trained")(number))
        trained.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))
        return trained
    user = keras.Input((), dtype="int64", name="user")
    both = [et.Embedding(None, 4, name="users")(user), et.Embedding(None, 4, name="numbers")(number)]
    hidden = keras.layers.Dropout(0.1)(keras.layers.Concatenate()(both))
    made = keras.Model([user, number], keras.layers.Dense(1, activation="sigmoid")(hidden))
    made.compile("adam", "binary_crossentropy")
    return made


def data(split: str) -> et.Reader | None:
    if split == "validation":
        return None
    label = "far" if COUNT else "clicked"
    return et.RedisStreamReader(os.environ["EVENTS"], KEYS, steps_per_epoch=10, label=label)


def send(client: redis.Redis, numbers: Iterable[int]) -> None:
    """Adds events of these numbers, to one stream twice as many as to the other."""
    random = np.random.default_rng(0)
    with client.pipeline() as pipe:
        for number in numbers:
            user = int(random.integers(50))
            event = {"number": number, "user": user, "clicked": user % 2, "far": 1e6}
            pipe.xadd(KEYS[number % 3 == 0], {"event": json.dumps(event)})
        pipe.execute()
