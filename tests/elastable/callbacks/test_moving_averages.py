"""`use_ema`: dense variables and rows of tables have the averages of plain Keras, and become them in the end."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from tests.elastable.callbacks import averaging_job
from tests.elastable.kept_jobs import assert_same, kept, killed_at, store_of, trained
from tests.untyped import Keyword

ROWS, DIM, BATCH, STEPS = 24, 4, 12, 5
JOB = Path(__file__).with_name("averaging_job.py")
JOB_OPTIONS = ("--epochs", "2", "--micro-batch-size", str(BATCH), "--workers", "1", "--checkpoint-every", "2")

OPTIMIZERS: dict[str, Callable[..., object]] = {
    "sgd": partial(keras.optimizers.SGD, 0.05),
    "adagrad": partial(keras.optimizers.Adagrad, 0.2),
    "adam": partial(keras.optimizers.Adam, 0.05),
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


def fitted(
    kind: type[keras.layers.Layer], optimizer: object, passes: tuple[int, ...], data: tuple[Array, Array] | None = None,
    batch_size: int = BATCH, **layer: Keyword,
) -> list[Array]:  # fmt: skip
    """The rows, the kernel and the bias after one call of `fit` for each number of epochs."""
    made = model(kind(ROWS, DIM, "ones", name="ids", **layer), optimizer)
    fit = et.fit if kind is et.Embedding else keras.Model.fit
    made.run_eagerly = kind is not et.Embedding  # for a few steps, a graph costs more
    for epochs in passes:
        fit(made, *(data or records()), epochs=epochs, batch_size=batch_size, shuffle=False, verbose=0)
    return [made.get_layer("ids").get_weights()[0], *made.get_layer("out").get_weights()]


def both(optimizer: Callable[[], object], *passes: int, **how: Keyword) -> tuple[list[Array], list[Array]]:
    """Ours and plain Keras'."""
    return fitted(et.Embedding, optimizer(), passes, **how), fitted(keras.layers.Embedding, optimizer(), passes, **how)


def require_equal(ours: list[Array], theirs: list[Array]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_equals_one_of_plain_keras(name: str, every: int | None) -> None:
    optimizer = partial(OPTIMIZERS[name], use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=every)
    ours, theirs = both(optimizer, 2, 1)
    require_equal(ours, theirs)
    plain = fitted(et.Embedding, OPTIMIZERS[name](), (2, 1))
    assert np.abs(plain[0] - theirs[0]).max() > 1e-3


def test_a_constraint_holds_after_the_average_as_in_keras() -> None:
    optimizer = partial(OPTIMIZERS["sgd"], use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)
    require_equal(*both(optimizer, 2, embeddings_constraint=keras.constraints.MaxNorm(1.9, axis=1)))


def test_a_row_that_comes_late_begins_its_average_where_it_was() -> None:
    """Under SGD an untouched row stays, and so does its average: the first touch is Keras' own."""
    ids = np.array([[0, 1]] * 4 + [[2, 3]] * 4 + [[4, 5]] * 4)
    data = (ids, np.linspace(-1, 1, len(ids), dtype=np.float32)[:, None])
    ours, theirs = both(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8), 1, data=data, batch_size=4)
    standing = [2, 3]
    others = np.setdiff1d(np.arange(ROWS), standing)
    np.testing.assert_allclose(ours[0][others], theirs[0][others], rtol=1e-5, atol=1e-5)
    # What the page says: in the third step their average stood still, while Keras' went on towards the rows.
    assert np.abs(ours[0][standing] - theirs[0][standing]).max() > 1e-3


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


def test_a_store_that_a_job_is_resumed_from_is_refused(redis_url: str) -> None:
    with pytest.raises(Unsupported, match=r"use_ema=True \(the model's optimizer, table 'words'\)"):
        prepare_job(JobOptions(JOB, store=redis_url))
