"""A model that learns from clicks while they come: whether a user of a segment clicks an item.

    elastable train examples/stream/clicks.py --workers 1 --store redis://HOST:PORT --micro-batch-size 256

CLICKS: URL of the server whose stream `clicks` has the events (`tastes.py` makes them).
"""

import os

import keras
from tastes import ITEMS, KEY

import elastable as et


def model() -> keras.Model:
    """How the segment likes the item, and how the user clicks at all; any new item has a row once it is seen."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "segment", "item")}
    liked = et.Embedding(None, 1, "zeros", name="likes")(inputs["segment"] * ITEMS + inputs["item"])
    clicks = et.Embedding(None, 1, "zeros", name="users")(inputs["user"])
    made = keras.Model(inputs, keras.layers.Activation("sigmoid", name="click")(liked + clicks), name="clicks")
    # Of a sum: each click moves its rows as far as any other, however many are trained together.
    made.compile(keras.optimizers.SGD(0.3), keras.losses.BinaryCrossentropy(reduction="sum"), metrics=["AUC"])
    return made


def data(split: str) -> et.Reader | None:
    """The events of the stream; there is nothing to validate with but what comes next."""
    if split == "validation":
        return None
    return et.RedisStreamReader(os.environ["CLICKS"], KEY, label="clicked")
