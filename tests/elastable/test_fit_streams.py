"""Streams with and without an end as `x` and `validation_data`: plain Keras' numbers, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import BadInput
from tests.elastable.test_model_fit import HELD_OUT, X, Y, assert_same, both, program

SIZE, STEPS = 8, 2


def dataset(x: Any = X, y: Any = Y, size: int = SIZE) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def forever() -> Iterator[Any]:
    while True:
        yield from ((X[start : start + SIZE], Y[start : start + SIZE]) for start in range(0, len(X), SIZE))


def unknown() -> Any:
    signature = (tf.TensorSpec([SIZE, 3], tf.int64), tf.TensorSpec([SIZE], tf.float32))
    return tf.data.Dataset.from_generator(forever, output_signature=signature)


class Endless(keras.utils.PyDataset):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, number: int) -> Any:
        part = slice(number % 9 * SIZE, (number % 9 + 1) * SIZE)
        return X[part], Y[part]


STREAMS = {"repeat": lambda: dataset().repeat(), "generator": forever, "unknown": unknown, "PyDataset": Endless}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("begin", [0, 1])
def test_a_stream_without_an_end_has_the_numbers_of_keras(kind: str, begin: int) -> None:
    def fit(model: Any) -> Any:
        return model.fit(
            STREAMS[kind](), steps_per_epoch=STEPS, epochs=3, initial_epoch=begin, verbose=0, shuffle=False
        )

    assert_same(*both(fit, metrics=["AUC"]))


@pytest.mark.parametrize("kind", ["repeat", "generator"])
def test_et_fit_takes_it_too_and_makes_steps_of_several_batches(kind: str) -> None:
    ours, theirs = program(et.Embedding), program(keras.layers.Embedding)
    history = et.fit(ours, STREAMS[kind](), steps_per_epoch=STEPS, epochs=2, grads_to_wait=2, verbose=0)
    expected = theirs.fit(dataset(size=2 * SIZE).repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0, shuffle=False)
    assert_same(ours, theirs, history, expected)


def test_validation_steps_of_a_stream_without_an_end() -> None:
    def fit(model: Any) -> Any:
        held_out = dataset(*HELD_OUT).repeat()
        return model.fit(dataset().repeat(), steps_per_epoch=4, epochs=3, verbose=0, validation_data=held_out,
                         validation_steps=3, shuffle=False)  # fmt: skip

    assert_same(*both(fit, metrics=["AUC"]))


def test_a_generator_to_evaluate_on_gives_its_first_batches() -> None:
    ours, theirs = program(et.Embedding), program(keras.layers.Embedding)
    history = ours.fit(dataset(), epochs=2, verbose=0, shuffle=False, validation_data=forever(), validation_steps=3)
    expected = theirs.fit(dataset(), epochs=2, verbose=0, shuffle=False, validation_data=(X[: 3 * SIZE], Y[: 3 * SIZE]))
    assert_same(ours, theirs, history, expected)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"x": dataset().repeat()}, r"x is a _RepeatDataset, a stream without an end: .*steps_per_epoch="),
        ({"x": forever()}, r"x is a generator, a stream without an end: .*steps_per_epoch="),
        ({"x": dataset(), "validation_data": forever()}, r"validation_data is a generator.*validation_steps="),
        ({"x": dataset(), "validation_data": dataset().repeat()}, r"validation_data is a _Rep.*validation_steps="),
        ({"x": dataset(size=7).repeat(2)}, r"batch 10 does not hold 7 records as the first one does"),
    ],
)  # fmt: skip
def test_what_cannot_be_as_in_keras_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        program(et.Embedding).fit(verbose=0, **arguments)


def test_a_batch_size_that_is_not_the_streams() -> None:
    with pytest.raises(BadInput, match="batch_size=16: the batches of the stream without an end hold 8 records"):
        et.fit(program(et.Embedding), forever(), steps_per_epoch=2, batch_size=16, verbose=0)
