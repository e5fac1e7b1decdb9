"""`layer.embeddings` of layers with tables in a store, where a model uses all rows: as in plain Keras."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.untyped import Keywords

ROWS, DIM = 24, 4
IDS = np.random.default_rng(0).integers(0, ROWS - 4, (48, 3))
NEXT = (IDS.sum(axis=1) % ROWS)[:, None]


def plain(**settings: object) -> keras.layers.Layer:
    initial = keras.initializers.RandomNormal(stddev=0.5, seed=1)
    return keras.layers.Embedding(ROWS, DIM, embeddings_initializer=initial, name="words", **settings)


def in_store() -> keras.layers.Layer:
    return et.Embedding(ROWS, DIM, weights=np.asarray(built(plain()).embeddings), name="words")


def built(layer: keras.layers.Layer) -> keras.layers.Layer:
    layer.build()
    return layer


class Subclassed(keras.Model):
    """Says which word comes next by its likeness to what came before."""

    def __init__(self, words: keras.layers.Layer) -> None:
        super().__init__()
        self.words = words

    def call(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        said = keras.ops.mean(self.words(ids), axis=1)
        return keras.ops.softmax(keras.ops.matmul(said, keras.ops.transpose(self.words.embeddings)))


def functional(words: keras.layers.Layer) -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    said = keras.ops.mean(words(ids), axis=1)
    return keras.Model(ids, keras.ops.softmax(keras.ops.einsum("bd,vd->bv", said, words.embeddings)))


def functional_built_first(words: object) -> keras.Model:
    return functional(built(words))


def trained(model: keras.Model, above: int = 0, by_keras: bool = False) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "sparse_categorical_crossentropy")
    settings: Keywords = {"batch_size": 16, "epochs": 3, "shuffle": False}
    if by_keras:
        model.fit(IDS, NEXT, verbose=0, **settings)
    else:
        et.fit(model, (IDS, NEXT), offload_embeddings_above=above, lazy=False, verbose=False, **settings)
    return model


@pytest.mark.parametrize("make", [Subclassed, functional_built_first])
def test_an_offloaded_table_is_trained_through_all_its_rows(make: Callable[[keras.layers.Layer], keras.Model]) -> None:
    theirs, ours = trained(make(plain()), by_keras=True), trained(make(plain()), above=1)
    words = next(layer for layer in ours.layers if layer.name == "words")
    assert words.source is not None
    expected = np.asarray(next(layer for layer in theirs.layers if layer.name == "words").embeddings)
    np.testing.assert_allclose(words.embeddings, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - built(plain()).embeddings).min() > 0  # also rows that are in no record
    np.testing.assert_allclose(ours.predict(IDS, verbose=0), theirs.predict(IDS, verbose=0), rtol=1e-4)


@pytest.mark.parametrize("make", [Subclassed, functional])
def test_so_is_a_table_of_ours(make: Callable[[keras.layers.Layer], keras.Model]) -> None:
    theirs, ours = trained(Subclassed(plain()), by_keras=True), trained(make(in_store()))
    np.testing.assert_allclose(ours.predict(IDS, verbose=0), theirs.predict(IDS, verbose=0), rtol=1e-4)
    words = next(layer for layer in ours.layers if layer.name == "words")
    words.embeddings.assign(np.ones((ROWS, DIM)))
    np.testing.assert_array_equal(words.read_rows(np.arange(ROWS)), np.ones((ROWS, DIM)))


class Holding(keras.layers.Layer):
    """Takes the variable, and not the layer."""

    def __init__(self, variable: object, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.variable = variable

    def call(self, said: keras.KerasTensor) -> keras.KerasTensor:
        return keras.ops.matmul(said, keras.ops.transpose(self.variable))


def test_a_variable_that_another_layer_holds_is_refused() -> None:
    ids, words = keras.Input((3,), dtype="int64"), built(plain())
    model = keras.Model(ids, Holding(words.embeddings, name="tied")(keras.ops.mean(words(ids), axis=1)))
    with pytest.raises(Unsupported, match=r"'words': layer 'tied' holds its variable.*use `layer.embeddings` in call"):
        trained(model, above=1)
