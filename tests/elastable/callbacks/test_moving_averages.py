"""`use_ema`: dense variables and rows of tables have the averages of plain Keras, and become them in the end."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported
from tests.elastable.callbacks import averaging_job
from tests.elastable.kept_jobs import assert_same, kept, killed_at, refusal, store_of, trained
from tests.untyped import Keyword

ROWS, DIM, BATCH, STEPS = 24, 4, 12, 5
JOB = Path(__file__).with_name("averaging_job.py")
JOB_OPTIONS = ("--epochs", "2", "--micro-batch-size", str(BATCH), "--workers", "1", "--checkpoint-every", "2")

OPTIMIZERS: dict[str, Callable[..., object]] = {
    "sgd": lambda **ema: keras.optimizers.SGD(0.05, **ema),
    "adagrad": lambda **ema: keras.optimizers.Adagrad(0.2, **ema),
    "adam": lambda **ema: keras.optimizers.Adam(0.05, **ema),
}


def records() -> tuple[Array, Array]:
    """Two ids a record; every batch has every id once."""
    random = np.random.default_rng(1)
    ids = np.concatenate([random.permutation(ROWS) for _ in range(STEPS)]).reshape(-1, 2)
    return ids, random.normal(size=(len(ids), 1)).astype(np.float32)


def model(embedding: keras.layers.Layer, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    ids = keras.Input((2,), dtype="int64")
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2), name="out")
    made = keras.Model(ids, out(keras.layers.Flatten()(embedding(ids))))
    made.compile(optimizer, "mse")
    return made


def fitted(optimizer: keras.optimizers.Optimizer, passes: tuple[int, ...], **layer: Keyword) -> list[Array]:
    """The rows, the kernel and the bias after one call of `et.fit` for each number of epochs."""
    made = model(et.Embedding(ROWS, DIM, embeddings_initializer="ones", name="ids", **layer), optimizer)
    for epochs in passes:
        et.fit(made, records(), epochs=epochs, batch_size=BATCH, shuffle=False, verbose=False)
    return [made.get_layer("ids").read_rows(np.arange(ROWS)), *made.get_layer("out").get_weights()]


def trained_by_keras(optimizer: object, passes: tuple[int, ...], **layer: object) -> list[Array]:
    made = model(keras.layers.Embedding(ROWS, DIM, "ones", name="ids", **layer), optimizer)
    for epochs in passes:
        made.fit(*records(), epochs=epochs, batch_size=BATCH, shuffle=False, verbose=0)
    return [np.asarray(made.get_layer("ids").embeddings), *made.get_layer("out").get_weights()]


def require_equal(ours: list[Array], theirs: list[Array]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_equals_one_of_plain_keras(name: str, every: int | None) -> None:
    def optimizer() -> object:
        return OPTIMIZERS[name](use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=every)

    theirs = trained_by_keras(optimizer(), (2, 1))
    require_equal(fitted(optimizer(), (2, 1)), theirs)
    plain = fitted(OPTIMIZERS[name](), (2, 1))
    assert np.abs(plain[0] - theirs[0]).max() > 1e-3


def test_a_constraint_holds_after_the_average_as_in_keras() -> None:
    def layer() -> dict[str, object]:
        return {"embeddings_constraint": keras.constraints.MaxNorm(1.9, axis=1)}

    def optimizer() -> object:
        return OPTIMIZERS["sgd"](use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)

    require_equal(fitted(optimizer(), (2,), **layer()), trained_by_keras(optimizer(), (2,), **layer()))


def test_a_row_that_comes_late_begins_its_average_where_it_was() -> None:
    """Under SGD an untouched row stays, and so does its average: the first touch is Keras' own."""
    ids = np.array([[0, 1]] * 4 + [[2, 3]] * 4 + [[4, 5]] * 4)
    data = (ids, np.linspace(-1, 1, len(ids), dtype=np.float32)[:, None])

    def optimizer() -> object:
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)

    theirs = model(keras.layers.Embedding(ROWS, DIM, "ones", name="ids"), optimizer())
    theirs.fit(*data, batch_size=4, shuffle=False, verbose=0)
    ours = model(et.Embedding(ROWS, DIM, embeddings_initializer="ones", name="ids"), optimizer())
    et.fit(ours, data, batch_size=4, shuffle=False, verbose=False)
    rows, expected = ours.get_layer("ids").read_rows(np.arange(ROWS)), np.asarray(theirs.get_layer("ids").embeddings)
    standing = [2, 3]
    others = np.setdiff1d(np.arange(ROWS), standing)
    np.testing.assert_allclose(rows[others], expected[others], rtol=1e-5, atol=1e-5)
    # What the page says: in the third step their average stood still, while Keras' went on towards the rows.
    assert np.abs(rows[standing] - expected[standing]).max() > 1e-3


def test_what_has_no_meaning_is_refused_by_name() -> None:
    def fit(optimizer: keras.optimizers.Optimizer, **settings: Keyword) -> None:
        made = model(et.Embedding(ROWS, DIM, name="ids"), optimizer)
        et.fit(made, records(), batch_size=BATCH, verbose=False, **settings)

    with pytest.raises(Unsupported, match=r"SGD\(use_ema=True\) with lazy=False"):
        fit(keras.optimizers.SGD(0.1, use_ema=True), lazy=False)
    with pytest.raises(Unsupported, match=r"use_ema=True, gradient_accumulation_steps=5\).*grads_to_wait"):
        fit(keras.optimizers.SGD(0.1, use_ema=True, gradient_accumulation_steps=5))
    made = model(et.Embedding(ROWS, DIM, name="ids"), keras.optimizers.SGD(0.1, use_ema=True))
    x, y = records()
    with et.step(made) as step, pytest.raises(Unsupported, match=r"et.step: SGD\(use_ema=True\)"):  # noqa: PT012
        with tf.GradientTape() as tape:
            loss = made.compute_loss(x, y, made(x))
        step.apply(tape, loss)


def test_a_job_that_is_resumed_ends_with_the_same_averages(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trained(JOB, whole, *JOB_OPTIONS)
    ended = kept(whole)
    block = store_of(ended).read_rows("words", np.arange(averaging_job.ROWS))
    np.testing.assert_array_equal(block.weights, block.slots[:, -1 - averaging_job.DIM : -1])

    killed_at(ended.version // 2, whole, resumed)
    assert "resuming at version" in trained(JOB, resumed, *JOB_OPTIONS, "--resume")
    assert_same(kept(resumed), ended)


def test_a_store_that_a_job_is_resumed_from_is_refused(tmp_path: Path, redis_url: str) -> None:
    message = refusal(JOB, tmp_path, *JOB_OPTIONS, "--checkpoint-dir", tmp_path / "saved", "--store", redis_url)
    assert "use_ema=True (the model's optimizer, table 'words')" in message
