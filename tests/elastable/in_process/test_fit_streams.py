"""Streams with and without an end as `x` and `validation_data`: plain Keras' numbers, or refused."""

from collections.abc import Callable, Iterator

import keras
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import BadInput
from tests.elastable.in_process.test_model_fit import HELD_OUT, ROWS, X, Y, assert_same, both, program

SIZE, STEPS = 8, 2


def dataset(x: object = X, y: object = Y, size: int = SIZE) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def forever() -> Iterator[object]:
    while True:
        yield from ((X[start : start + SIZE], Y[start : start + SIZE]) for start in range(0, len(X), SIZE))


def unknown() -> object:
    signature = (tf.TensorSpec([SIZE, 3], tf.int64), tf.TensorSpec([SIZE], tf.float32))
    return tf.data.Dataset.from_generator(forever, output_signature=signature)


class Endless(keras.utils.PyDataset):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, number: int) -> object:
        part = slice(number % 9 * SIZE, (number % 9 + 1) * SIZE)
        return X[part], Y[part]


STREAMS = {
    "repeat": lambda: dataset().repeat(),
    "sizes": lambda: dataset(size=25).repeat(),  # the last batch of a round is smaller
    "generator": forever,
    "unknown": unknown,
    "PyDataset": Endless,
}


@pytest.mark.parametrize(("kind", "begin"), [("repeat", 0), ("sizes", 0), ("unknown", 1), ("PyDataset", 0)])
def test_a_stream_without_an_end_has_the_numbers_of_keras(kind: str, begin: int) -> None:
    def fit(model: keras.Model) -> keras.callbacks.History:
        return model.fit(
            STREAMS[kind](), steps_per_epoch=STEPS, epochs=3, initial_epoch=begin, verbose=0, shuffle=False
        )

    assert_same(*both(fit, metrics=["AUC"]))


def test_et_fit_takes_it_too_and_makes_steps_of_several_batches() -> None:
    ours, theirs = program(et.Embedding), program(keras.layers.Embedding)
    history = et.fit(ours, forever(), steps_per_epoch=STEPS, epochs=2, grads_to_wait=2, verbose=0)
    expected = theirs.fit(dataset(size=2 * SIZE).repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0, shuffle=False)
    assert_same(ours, theirs, history, expected)


def test_a_generator_to_evaluate_on_gives_its_first_batches() -> None:
    ours, theirs = program(et.Embedding), program(keras.layers.Embedding)
    history = ours.fit(dataset(), epochs=2, verbose=0, shuffle=False, validation_data=forever(), validation_steps=3)
    expected = theirs.fit(dataset(), epochs=2, verbose=0, shuffle=False, validation_data=(X[: 3 * SIZE], Y[: 3 * SIZE]))
    assert_same(ours, theirs, history, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": dataset().repeat()}, r"x is a _RepeatDataset, a stream without an end: .*steps_per_epoch="),
        ({"x": forever()}, r"x is a generator, a stream without an end: .*steps_per_epoch="),
        ({"x": dataset(), "validation_data": forever()}, r"validation_data is a generator.*validation_steps="),
        ({"x": dataset(), "validation_data": dataset().repeat()}, r"validation_data is a _Rep.*validation_steps="),
    ],
)  # fmt: skip
def test_what_cannot_be_as_in_keras_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        program(et.Embedding).fit(verbose=0, **arguments)


def test_a_batch_size_that_is_not_the_streams() -> None:
    with pytest.raises(BadInput, match="batch_size=16: the batches of the stream without an end hold 8 records"):
        et.fit(program(et.Embedding), forever(), steps_per_epoch=2, batch_size=16, verbose=0)


# Streams with an end: each pass reads them anew


class Batches(keras.utils.PyDataset):
    """Batches of which the last is smaller; the ids move on with every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.epoch = 0

    @property
    def num_batches(self) -> int:
        return 10

    def __getitem__(self, number: int) -> object:
        part = slice(number * 7, (number + 1) * 7 if number < 9 else 68)
        return (X[part] + self.epoch) % ROWS, Y[part]

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self.epoch += 1


def uneven() -> object:
    return dataset(X[:4], Y[:4]).concatenate(dataset(X[4:], Y[4:]))


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=3).batch(7)


def augmented() -> object:
    """A length that nobody knows, and other records in every pass."""
    whole = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: x[0] < ROWS - 3)
    return (
        whole.shuffle(len(X), seed=5).batch(7).map(lambda x, y: ((x + tf.random.uniform([], 0, 9, tf.int64)) % ROWS, y))
    )


@pytest.mark.parametrize(
    ("kind", "more", "call"),
    [
        (Batches, {"shuffle": True, "initial_epoch": 1, "class_weight": {0: 0.3, 1: 2.0}}, et.fit),
        (shuffled, {"shuffle": False, "steps_per_epoch": 4, "epochs": 5}, keras.Model.fit),
    ],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:steps_per_epoch=4")
def test_every_pass_reads_a_stream_anew_as_keras_does(
    kind: Callable[[], object], more: dict[str, object], call: Callable[..., object]
) -> None:
    def fit(model: keras.Model, call: Callable[..., object]) -> tuple[object, keras.callbacks.History]:
        keras.utils.set_random_seed(13)
        stream = kind()
        return stream, call(model, stream, **{"epochs": 3, "verbose": 0, "validation_data": HELD_OUT, **more})

    ours, theirs = program(et.Embedding), program(keras.layers.Embedding)
    stream, history = fit(ours, call)
    other, expected = fit(theirs, keras.Model.fit)
    assert_same(ours, theirs, history, expected)
    if isinstance(stream, Batches) and isinstance(other, Batches):
        assert stream.calls == other.calls


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Batches, {}),
        (Batches, {"validation_freq": 2}),
        (lambda: shuffled().take(3), {}),
        (uneven, {"validation_steps": 2}),
    ],
)
def test_every_evaluation_reads_a_stream_anew_as_keras_does(
    kind: Callable[[], object], more: dict[str, object]
) -> None:
    def fit(model: keras.Model) -> keras.callbacks.History:
        keras.utils.set_random_seed(13)
        return model.fit(dataset(), epochs=4, verbose=0, shuffle=False, validation_data=kind(), **more)

    assert_same(*both(fit))


def test_an_evaluation_of_other_length_is_refused() -> None:
    class Shorter(Batches):
        @property
        def num_batches(self) -> int:
            return 10 - self.epoch // 2

    with pytest.raises(BadInput, match=r"Shorter: 63 records to evaluate version 18 on, and 68 before: .*StreamReader"):
        program(et.Embedding).fit(dataset(), epochs=4, verbose=0, validation_data=Shorter())


def test_a_stream_of_unknown_length_is_read_anew_too() -> None:
    """Keras learns its length in the first epoch, and says that the data ran out."""
    ours, theirs = program(et.Embedding), program(keras.layers.Embedding)
    keras.utils.set_random_seed(13)
    history = ours.fit(augmented(), epochs=3, verbose=0)
    keras.utils.set_random_seed(13)
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = theirs.fit(augmented(), epochs=3, verbose=0, shuffle=False)
    assert_same(ours, theirs, history, expected)


def test_batches_of_any_size_are_those_of_keras() -> None:
    """The short one comes in the middle: at the end of each of two rounds."""
    ours, theirs, *histories = both(
        lambda model: model.fit(dataset(size=7).repeat(2), epochs=2, verbose=0, shuffle=False)
    )
    assert_same(ours, theirs, *histories)


def test_steps_of_several_batches_of_different_sizes() -> None:
    """Sizes 4 and 8: a step of both is a step of their 12 records."""
    pairs = [slice(start, start + size) for start in range(0, 72, 12) for start, size in ((start, 4), (start + 4, 8))]
    signature = (tf.TensorSpec([None, 3], tf.int64), tf.TensorSpec([None], tf.float32))
    parts = tf.data.Dataset.from_generator(lambda: ((X[part], Y[part]) for part in pairs), output_signature=signature)
    ours, theirs = program(et.Embedding), program(keras.layers.Embedding)
    history = et.fit(ours, parts, grads_to_wait=2, epochs=2, verbose=0)
    assert_same(ours, theirs, history, theirs.fit(X, Y, 12, epochs=2, verbose=0, shuffle=False))


def test_a_pass_that_is_shorter_than_the_first_is_refused() -> None:
    class Shrinking(Batches):
        @property
        def num_batches(self) -> int:
            return 3 if self.epoch > 1 else 5

    with pytest.raises(BadInput, match=r"Shrinking: pass 1.* ended after 3 batches, and the first one after 5"):
        program(et.Embedding).fit(Shrinking(), epochs=2, verbose=0, shuffle=False)
