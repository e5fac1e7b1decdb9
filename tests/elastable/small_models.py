"""Small Keras models and records that several tests train."""

from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array

USERS, WORDS, DIM = 30, 40, 4


def clicks(records: int = 96, seed: int = 0) -> tuple[dict[str, Array], Array]:
    """Ids of users `[n]` and words `[n, 3]`, and whether they click, which one can learn."""
    random = np.random.default_rng(seed)
    users = random.integers(0, USERS, records)
    words = random.integers(0, WORDS, (records, 3))
    return {"user": users, "word": words}, (users % 2 == 0).astype(np.float32)


def model_of(user: keras.layers.Layer, word: keras.layers.Layer) -> object:
    """The click model with these two embedding layers; not compiled."""
    users = keras.Input((), dtype="int64", name="user")
    words = keras.Input((3,), dtype="int64", name="word")
    said = keras.ops.mean(word(words), axis=1)
    hidden = keras.layers.Dense(8, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(seed=3))(
        keras.layers.Concatenate()([user(users), said])
    )
    out = keras.layers.Dense(1, activation="sigmoid", kernel_initializer=keras.initializers.GlorotUniform(seed=4))
    return keras.Model([users, words], out(hidden))


def store_model() -> keras.Model:
    """Two tables in a store and two dense layers; not compiled."""
    return model_of(
        et.Embedding(USERS, DIM, name="users", embeddings_initializer="ones"),
        et.Embedding(WORDS, DIM, name="words", embeddings_initializer="ones"),
    )


def plain_model() -> keras.Model:
    """The same with `keras.layers.Embedding`, and equal initial values."""
    return model_of(
        keras.layers.Embedding(USERS, DIM, name="users", embeddings_initializer="ones"),
        keras.layers.Embedding(WORDS, DIM, name="words", embeddings_initializer="ones"),
    )


def tables_and_weights(model: keras.Model) -> dict[str, Array]:
    """Both tables, wherever they are, and all dense weights of one of the models above."""
    found = {}
    for name, size in (("users", USERS), ("words", WORDS)):
        layer = model.get_layer(name)
        in_store = isinstance(layer, et.Embedding)
        found[name] = layer.read_rows(np.arange(size)) if in_store else np.asarray(layer.embeddings)
    dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    for number, layer in enumerate(dense):
        for part, value in enumerate(layer.get_weights()):
            found[f"dense {number} {part}"] = value
    return found


def assert_same(ours: keras.Model, theirs: keras.Model, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Fails where an entry of a table or a weight differs, or by more than so much."""
    expected = tables_and_weights(theirs)
    for name, values in tables_and_weights(ours).items():
        np.testing.assert_allclose(values, expected[name], rtol=rtol, atol=atol, err_msg=name)


def assert_close(one: keras.Model, other: keras.Model, relative: float = 1e-5) -> None:
    """Fails where a table or a weight differs by more than so much of its norm."""
    ours, theirs = tables_and_weights(one), tables_and_weights(other)
    for name, values in theirs.items():
        difference = np.linalg.norm(ours[name] - values) / np.linalg.norm(values)
        assert difference <= relative, f"{name}: {difference}"


def trained_by_tape(
    optimizer: keras.optimizers.Optimizer,
    records: tuple[dict[str, Array], Array],
    batch_size: int,
    epochs: int = 2,
    model: keras.Model | None = None,
    loss: Callable[..., object] | str = "binary_crossentropy",
    own: Mapping[str, keras.optimizers.Optimizer] | None = None,
) -> keras.Model:
    """Plain Keras' own steps, with an id's gradients summed; `own`: what trains the variables of a layer instead.

    `model.fit` hands optimizers `IndexedSlices` with ids more than once, of which they clip and square each occurrence
    by itself.
    """
    if model is None:
        model = plain_model()
        model.compile(optimizer, loss)
    variables, optimizer, (x, y) = model.trainable_variables, model.optimizer, records
    for _ in range(epochs):
        for start in range(0, len(y), batch_size):
            batch = {name: values[start : start + batch_size] for name, values in x.items()}
            with tf.GradientTape() as tape:
                found = model.compute_loss(y=y[start : start + batch_size], y_pred=model(batch, training=True))
                found = optimizer.scale_loss(found)
            gradients = tape.gradient(found, [variable.value for variable in variables])
            rest = []
            for variable, gradient in zip(variables, map(tf.convert_to_tensor, gradients), strict=True):
                its = (own or {}).get(variable.path.split("/")[0])
                rest += [(gradient, variable)] if its is None else []
                if its is not None:
                    its.apply([gradient], [variable])
            optimizer.apply(*zip(*rest, strict=True))
    return model
