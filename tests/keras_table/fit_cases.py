"""What `Model.fit` takes, with `et.fit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import keras
import numpy as np

from elastable.master.backend.lazy import tf
from tests.keras_table.case import BATCH, RECORDS, Case, Side, small, trained
from tests.keras_table.compile_cases import two_outputs


def _c(name: str, *covers: str, meaning: str = "", **fit: object) -> Case:
    return Case(name, lambda side: trained(side, fit=fit), " ".join(f"fit.{cover}" for cover in covers), meaning)


def _with(name: str, fit: Callable[..., object], *covers: str, meaning: str = "", **compiled: object) -> Case:
    """`fit` is called with the side, and returns the arguments."""
    covered = " ".join(f"fit.{cover}" for cover in covers)
    return Case(name, lambda side: trained(side, fit=fit(side), **compiled), covered, meaning)


def _fitted(
    side: Side, data: _Batches | tf.data.Dataset | Iterator[tuple[np.ndarray, np.ndarray]], **options: object
) -> object:
    model = small(side)
    model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=True)
    history = side.fit(model, data, **options)
    return [dict(history.history), model.predict(side.x, verbose=0)]


def _dataset(side: Side) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((side.x, side.y)).batch(BATCH)


class _Batches(keras.utils.PyDataset):
    def __init__(self, side: Side) -> None:
        super().__init__()
        self.x, self.y = side.x, side.y

    def __len__(self) -> int:
        return RECORDS // BATCH

    def __getitem__(self, batch: int) -> object:
        part = slice(batch * BATCH, (batch + 1) * BATCH)
        return self.x[part], self.y[part]


def _generator(side: Side) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        for start in range(0, RECORDS, BATCH):
            yield side.x[start : start + BATCH], side.y[start : start + BATCH]


def _shuffled(side: Side) -> object:
    """How many epochs and steps there were: orders differ."""
    model = small(side)
    history = trained(side, model, fit={"shuffle": True, "epochs": 2})["history"]
    return [len(history["loss"]), int(model.optimizer.iterations)]


def _class_weights(side: Side) -> object:
    model, fit = small(side, activation="sigmoid"), {"class_weight": {0: 0.5, 1: 3.0}}
    return trained(side, model, y=side.labels, loss="binary_crossentropy", fit=fit)


def _weights_of_outputs(side: Side) -> object:
    weights = {"one": side.weights, "two": side.weights[::-1].copy()}
    y, loss = {"one": side.y, "two": side.y * 2}, {"one": "mse", "two": "mae"}
    return trained(side, two_outputs(side), y=y, loss=loss, fit={"sample_weight": weights})


def _twice(side: Side) -> object:
    model = small(side)
    trained(side, model, fit={"epochs": 2})
    return [dict(side.fit(model, side.x, side.y, epochs=4, initial_epoch=2).history), model.predict(side.x, verbose=0)]


def _running_out(side: Side, **given: object) -> object:
    """`trained`, where the data ends before the epoch does: both sides warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
        warnings.filterwarnings("ignore", ".*the data ends after", UserWarning)
        return trained(side, **given)


CASES = [
    _c("`fit(x, y, batch_size=8)`", "x", "y", "batch_size"),
    _c("`batch_size=7`, which leaves a smaller batch at the end", "batch_size", batch_size=7),
    _c("`batch_size=None`", "batch_size", batch_size=None),
    _c("`epochs=3`", "epochs", epochs=3),
    Case(
        "`verbose='auto'`, `1`, `2`, `0`",
        lambda side: [trained(side, fit={"verbose": verbose}) for verbose in ("auto", 1, 2, 0)],
        "fit.verbose",
    ),
    Case("`initial_epoch=2, epochs=4`, after a fit of two", _twice, "fit.initial_epoch"),
    Case("`shuffle=True`", _shuffled, "fit.shuffle", "each record once an epoch, in an order that belongs to `seed`"),
    _c("`shuffle=True`, one batch an epoch", "shuffle", shuffle=True, epochs=3, batch_size=RECORDS),
    _with(
        "`validation_data=(x, y)`",
        lambda side: {"validation_data": (side.x, side.y * 2), "epochs": 2},
        "validation_data",
        metrics=["mae"],
    ),
    _with(
        "`validation_data=(x, y, sample_weight)`",
        lambda side: {"validation_data": (side.x, side.y * 2, side.weights)},
        "validation_data",
    ),
    _c("`validation_split=0.25`", "validation_split", validation_split=0.25),
    *(
        _with(f"`{name}={value}`", lambda side, options=options: {"validation_data": (side.x, side.y), **options}, name)
        for name, value, options in (
            ("validation_batch_size", 6, {"validation_batch_size": 6}),
            ("validation_steps", 2, {"validation_steps": 2, "epochs": 3}),
            ("validation_freq", 2, {"validation_freq": 2, "epochs": 4}),
            ("validation_freq", [1, 3], {"validation_freq": [1, 3], "epochs": 3}),
        )
    ),
    Case("`class_weight={0: 0.5, 1: 3.0}`", _class_weights, "fit.class_weight"),
    _with("`sample_weight=w`", lambda side: {"sample_weight": side.weights}, "sample_weight", metrics=["mae"]),
    _with(
        "`sample_weight=w`, some of them 0",
        lambda side: {"sample_weight": side.weights * (np.arange(RECORDS) % 2)},
        "sample_weight",
    ),
    Case("`sample_weight={'one': ..., 'two': ...}`", _weights_of_outputs, "fit.sample_weight"),
    Case("`steps_per_epoch=2`", lambda side: _running_out(side, fit={"steps_per_epoch": 2}), "fit.steps_per_epoch"),
    _c("`callbacks=None`", "callbacks", callbacks=None),
    Case("`x=` a `tf.data.Dataset`", lambda side: _fitted(side, _dataset(side)), "fit.x", only="tensorflow"),
    Case(
        "`x=` a `tf.data.Dataset` without an end, `steps_per_epoch=2`",
        lambda side: _fitted(side, _dataset(side).repeat(), steps_per_epoch=2, epochs=2),
        "fit.x fit.steps_per_epoch",
        only="tensorflow",
    ),
    Case(
        "`validation_data=` a `tf.data.Dataset` without an end, `validation_steps=2`",
        lambda side: _fitted(side, _dataset(side), validation_data=_dataset(side).repeat(), validation_steps=2),
        "fit.validation_data fit.validation_steps",
        only="tensorflow",
    ),
    Case("`x=` a `keras.utils.PyDataset`", lambda side: _fitted(side, _Batches(side)), "fit.x"),
    Case(
        "`x=` a generator, `steps_per_epoch=3`",
        lambda side: _fitted(side, _generator(side), steps_per_epoch=3),
        "fit.x",
    ),
    Case("no records", lambda side: _running_out(side, x=side.x[:0], y=side.y[:0]), "fit.x", only="tensorflow"),
]
