"""The models of the jobs that the command trains; `SAME_BITS_MODEL` names one."""

import os
import signal

import keras
import numpy as np

import elastable as et
from tests.same_bits.arrays import nudged, require_own_tree

require_own_tree()

RECORDS, WORDS = 256, 4
_NAME = os.environ.get("SAME_BITS_MODEL", "adam")
_OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.9)),
    "clipped": lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.5),
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "every-row": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
    "members": lambda: keras.optimizers.Adagrad(0.1),
    "average": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_momentum=0.9),
}


def data(split: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A user and some words a record, and a number that depends on them."""
    count = RECORDS if split == "train" else RECORDS // 4
    random = np.random.default_rng(5 if split == "train" else 6)
    users = random.integers(0, 30, count) + 30 * (_NAME == "outside")
    words = np.minimum(random.geometric(0.05, (count, WORDS)), 90) * (-(10**12))
    target = np.sin(users) + 0.2 * np.cos(words[:, 0] / 10**12) + random.normal(0, 0.1, count)
    return {"user": users, "word": words}, nudged(target + 2.0)[:, None]


def model() -> keras.Model:
    """BatchNormalization, dropout, regularizers of a table and a layer, a bag of words of any ids."""
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "word": keras.Input((WORDS,), dtype="int64", name="word"),
    }
    members, every = _NAME == "members", _NAME == "every-row"
    penalty = None if every or _NAME == "average" else keras.regularizers.L2(1e-3)
    if _NAME == "unsupported":
        every, penalty = True, keras.regularizers.L2(1e-3)
    user = et.Embedding(30, 6, "normal", penalty, name="users", lazy=not every)(inputs["user"])
    word = et.Embedding(
        None,
        5,
        combiner="mean",
        name="words",
        lazy=not every,
        table_dtype="bfloat16" if members else None,
        admission=et.AdmissionSpec(3, 1 << 12) if members else None,
        eviction=et.EvictionSpec(max_age=3, every=2) if members else None,
    )(inputs["word"])
    joined = keras.layers.BatchNormalization()(keras.layers.Concatenate()([user, word]))
    hidden = keras.layers.Dense(12, "tanh", kernel_regularizer="l2")(keras.layers.Dropout(0.2)(joined))
    made = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    made.compile(_OPTIMIZERS.get(_NAME, _OPTIMIZERS["adam"])(), "mse", metrics=["mae"])
    return made


class _Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if int(self.model.optimizer.iterations) == int(os.environ["SAME_BITS_DIES_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)


def callbacks() -> list[object]:
    """With `SAME_BITS_DIES_AT` the master is killed at that version."""
    return [_Dies()] if os.environ.get("SAME_BITS_DIES_AT") else []
