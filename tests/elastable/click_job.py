"""The model file of the command's tests: small, and with everything whose state a resume must bring back.

Set in its environment:

* HOLD: a directory; the master waits in it at version HOLD_AT until the file "go" is there;
* EXTRA: so many training records more than the master has.
"""

import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import elastable as et

RECORDS = 1_280
HELD_OUT = 320
HOLD_LIMIT_S = 240.0


def model() -> keras.Model:
    users = keras.Input((), dtype="int64", name="user_ids")
    words = keras.Input((3,), dtype="int64", name="word_ids")
    user = et.Embedding(50, 8, name="users")(users)
    said = et.Embedding(None, 8, name="words", combiner="mean")(words)
    both = keras.layers.Concatenate()([user, said])
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.BatchNormalization()(both))
    hidden = keras.layers.Dropout(0.1)(hidden)
    made = keras.Model([users, words], keras.layers.Dense(1, activation="sigmoid")(hidden))
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.9)
    made.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return made


def data(split: str) -> Any:
    extra = int(os.environ.get("EXTRA", "0")) if split == "train" else 0
    random = np.random.default_rng(0 if split == "train" else 1)
    count = RECORDS + extra if split == "train" else HELD_OUT
    users = random.integers(0, 50, count)
    known = np.random.default_rng(2).integers(-(2**62), 2**62, 40)
    words = known[random.integers(0, len(known), (count, 3))]
    # Users and words of an even kind click.
    clicked = (users % 2 == 0) & (random.random(count) < 0.9)
    return {"user_ids": users, "word_ids": words}, clicked.astype("float32")


class Hold(keras.callbacks.Callback):
    """Stops the clock at one version, so that a test can act in the middle of a job."""

    def __init__(self, home: Path, version: int) -> None:
        super().__init__()
        self._home = home
        self._version = version

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if int(self.model.optimizer.iterations) != self._version:
            return
        (self._home / "held").touch()
        give_up = time.monotonic() + HOLD_LIMIT_S
        while not (self._home / "go").exists() and time.monotonic() < give_up:
            time.sleep(0.02)


def callbacks() -> list[object]:
    home = os.environ.get("HOLD")
    return [Hold(Path(home), int(os.environ["HOLD_AT"]))] if home else []
