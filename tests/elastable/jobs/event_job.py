"""A model file that trains on events of EVENTS, the URL of Redis Streams or the addresses of Kafka, or counts them.

With COUNT each event adds exactly 1 to the row of its number, in whatever order and cut it is trained. HOLD,
HOLD_AT: as of `click_job`.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import keras
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
    where = os.environ["EVENTS"]
    options: dict[str, Any] = {"steps_per_epoch": 10, "label": "far" if COUNT else "clicked"}
    if "://" not in where:
        return et.KafkaReader(KEYS, where, config={"log_level": 0}, **options)
    return et.RedisStreamReader(where, KEYS, **options)


def event_of(number: int) -> tuple[str, dict[str, Any]]:
    """The stream that the event of a number is in, and the event: one stream has twice as many as the other."""
    user = (7 * number + number**2) % 50
    return KEYS[number % 3 == 0], {"number": number, "user": user, "clicked": user % 2, "far": 1e6}


def send(client: redis.Redis, numbers: Iterable[int]) -> None:
    """Adds events of these numbers to the streams."""
    with client.pipeline() as pipe:
        for key, event in map(event_of, numbers):
            pipe.xadd(key, {"event": json.dumps(event)})
        pipe.execute()
