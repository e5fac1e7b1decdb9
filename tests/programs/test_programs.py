"""Whole programs as new users type them, each compared with plain Keras: the same final numbers.

A program is a function of one argument: how an embedding layer is made, and how a model is trained. Plain Keras takes
its layers with dense gradients of repeated ids where the optimizer needs it (docs/fit.md): `SGD` does not.
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import pytest

import elastable as et

USERS, ITEMS, RECORDS = 40, 60, 256
Fit = Callable[..., object]
Results = tuple[keras.callbacks.History, Sequence[np.ndarray]]


def _plain(model: keras.Model, x: object, y: object = None) -> object:
    model.run_eagerly = True  # for a few steps, a graph costs more
    return model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)


def _stored(model: keras.Model, x: object, y: object = None) -> object:
    data = (x,) if y is None else (x, y)
    return et.fit(
        model, data, batch_size=64, epochs=2, shuffle=False, verbose=False, offload_embeddings_above=1, lazy=False
    )


def records() -> dict[str, np.ndarray]:
    """Users, items, words of titles (0: padding) and ratings."""
    random = np.random.default_rng(0)
    user, item = random.integers(0, USERS, RECORDS), random.integers(0, ITEMS, RECORDS)
    words = random.integers(1, 30, (RECORDS, 5)) * (np.arange(5) < random.integers(1, 6, (RECORDS, 1)))
    taste = random.normal(size=(USERS, 2)), random.normal(size=(ITEMS, 2))
    rating = (taste[0][user] * taste[1][item]).sum(axis=1).astype(np.float32)
    return {"user": user, "item": item, "words": words, "rating": rating, "liked": (rating > 0).astype(np.float32)}


def dlrm(fit: Fit) -> object:
    """Dense features through one tower, embeddings and their products through another."""
    data = records()
    dense = keras.Input((3,), name="numbers")
    ids = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    bottom = keras.layers.Dense(8, "relu")(dense)
    rows = [
        keras.layers.Embedding(size, 8, name=f"{name}s")(ids[name]) for name, size in (("user", USERS), ("item", ITEMS))
    ]
    pairs = [keras.layers.Dot(axes=1)([one, other]) for one, other in ((rows[0], rows[1]), (rows[0], bottom))]
    top = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()([bottom, *pairs]))
    model = keras.Model({"numbers": dense, **ids}, keras.layers.Dense(1, "sigmoid")(top))
    model.compile(keras.optimizers.SGD(0.3, momentum=0.9), "binary_crossentropy", metrics=["AUC"])
    x = {"numbers": np.random.default_rng(1).normal(size=(RECORDS, 3)).astype(np.float32)}
    x |= {name: data[name] for name in ids}
    return fit(model, x, data["liked"]), model.predict(x, verbose=0)


def two_towers(fit: Fit) -> object:
    """Retrieval: each user's item against the other items of the batch, in `compute_loss`."""

    class Retrieval(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users = keras.layers.Embedding(USERS, 8, name="users")
            self.items = keras.layers.Embedding(ITEMS, 8, name="items")

        def build(self, shapes: dict[str, tuple[int | None, ...]]) -> None:
            self.users.build(shapes["user"])
            self.items.build(shapes["item"])

        def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
            return self.users(inputs["user"])

        def compute_loss(
            self,
            x: dict[str, keras.KerasTensor] | None = None,
            y: keras.KerasTensor | None = None,
            y_pred: keras.KerasTensor | None = None,
            sample_weight: keras.KerasTensor | None = None,
            training: object = True,
        ) -> object:
            assert x is not None
            scores = keras.ops.matmul(y_pred, keras.ops.transpose(self.items(x["item"])))
            right = keras.ops.arange(keras.ops.shape(scores)[0])
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(right, scores, from_logits=True))

    data = records()
    x = {name: data[name] for name in ("user", "item")}
    model = Retrieval()
    model({name: values[:2] for name, values in x.items()})
    model.compile(keras.optimizers.SGD(5.0))
    return fit(model, x), model.predict(x, verbose=0)


def multi_task(fit: Fit) -> object:
    """Two outputs, each with its own loss, weight and metrics."""
    data = records()
    ids = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    rows = [
        keras.layers.Embedding(size, 4, name=f"{name}s")(ids[name]) for name, size in (("user", USERS), ("item", ITEMS))
    ]
    shared = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()(rows))
    outputs = {
        "rating": keras.layers.Dense(1, name="rating")(shared),
        "liked": keras.layers.Dense(1, "sigmoid", name="liked")(shared),
    }
    model = keras.Model(ids, outputs)
    model.compile(
        keras.optimizers.SGD(0.1),
        {"rating": "mse", "liked": "binary_crossentropy"},
        loss_weights={"rating": 0.5, "liked": 2.0},
        metrics={"rating": ["mae"], "liked": ["AUC"]},
    )
    x = {name: data[name] for name in ids}
    history = fit(model, x, {name: data[name][:, None] for name in outputs})
    return history, list(model.predict(x, verbose=0).values())


def sequence(fit: Fit) -> object:
    """Words of a title, padded with 0, through a recurrent layer."""
    data = records()
    words = keras.Input((5,), dtype="int64", name="words")
    rows = keras.layers.Embedding(30, 8, mask_zero=True, name="vocabulary")(words)
    model = keras.Model(words, keras.layers.Dense(1)(keras.layers.GRU(8)(rows)))
    model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse", metrics=["mae"])
    return fit(model, data["words"], data["rating"]), model.predict(data["words"], verbose=0)


def shared_embedding(fit: Fit) -> object:
    """A Sequential encoder, applied to two titles: one embedding, one dense layer, used twice."""
    data = records()
    encoder = keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            keras.layers.Embedding(30, 8, name="vocabulary"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(4, name="encoded"),
        ]
    )
    titles = [keras.Input((5,), dtype="int64", name=name) for name in ("one", "other")]
    alike = keras.layers.Dot(axes=1)([encoder(title) for title in titles])
    model = keras.Model(titles, alike)
    model.compile(keras.optimizers.SGD(0.3), "mse")
    x = [data["words"], data["words"][::-1].copy()]
    return fit(model, x, data["liked"]), model.predict(x, verbose=0)


def wide_and_deep(fit: Fit) -> object:
    """Strings and numbers hashed by preprocessing layers before training; crossed ids for the wide part."""
    data = records()
    cities = np.array(["Oslo", "Rome", "Lima", "Bern"])[data["user"] % 4]
    lookup = keras.layers.StringLookup(vocabulary=["Oslo", "Rome", "Lima"])
    hashing = keras.layers.Hashing(num_bins=20)
    x = {"city": np.asarray(lookup(cities)), "item": np.asarray(hashing(data["item"].astype(str)))}
    x["crossed"] = x["city"] * 20 + x["item"]
    ids = {name: keras.Input((), dtype="int64", name=name) for name in x}
    deep = [
        keras.layers.Embedding(size, 6, name=f"{name}_rows")(ids[name]) for name, size in (("city", 4), ("item", 20))
    ]
    wide = keras.layers.Embedding(80, 1, embeddings_initializer="zeros", name="wide")(ids["crossed"])
    hidden = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()(deep))
    logit = keras.layers.Add()([keras.layers.Dense(1)(hidden), wide])
    model = keras.Model(ids, keras.layers.Activation("sigmoid")(logit))
    model.compile(keras.optimizers.SGD(0.2), "binary_crossentropy", metrics=["AUC"])
    return fit(model, x, data["liked"]), model.predict(x, verbose=0)


def subclassed(fit: Fit) -> object:
    """A subclass of `keras.Model` with dropout off, batch normalization and a regularized head."""

    class Ratings(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users = keras.layers.Embedding(USERS, 6, name="users")
            self.items = keras.layers.Embedding(ITEMS, 6, name="items")
            self.normal = keras.layers.BatchNormalization()
            self.head = keras.layers.Dense(1, kernel_regularizer="l2")

        def call(self, inputs: keras.KerasTensor, training: object = None) -> keras.KerasTensor:
            together = self.users(inputs["user"]) * self.items(inputs["item"])
            return self.head(self.normal(together, training=training))

    data = records()
    x = {name: data[name] for name in ("user", "item")}
    model = Ratings()
    model({name: values[:2] for name, values in x.items()})
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return fit(model, x, data["rating"]), model.predict(x, verbose=0)


PROGRAMS = [dlrm, multi_task, two_towers, subclassed, sequence, shared_embedding, wide_and_deep]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_ends_with_plain_keras_numbers(program: Callable[[Fit], Results]) -> None:
    results = []
    for fit in (_plain, _stored):
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        results.append(program(fit))
    (expected_history, expected), (history, found) = results
    assert history.history.keys() == expected_history.history.keys()
    for name, values in expected_history.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=2e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(np.hstack(found), np.hstack(expected), rtol=1e-4, atol=1e-4)
    assert len(set(expected_history.history["loss"])) == 2, "nothing was learned"
