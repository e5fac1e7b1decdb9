"""`et.fit(lazy=False)` against plain Keras, which steps every row of every table at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

import elastable as et
from elastable.command import app
from elastable.embedding_store.errors import Unsupported
from elastable.options import JobOptions
from elastable.prepare import prepare_job
from tests.elastable import click_job

ROWS, DIM, BATCH, STEPS = 400, 6, 8, 200
SEED = 3


def records() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Three ids a record, few of them often and most of them seldom, and some in no record."""
    random = np.random.default_rng(1)
    ids = np.minimum((random.pareto(0.5, (BATCH * STEPS // 2, 3))).astype(np.int64), ROWS - 20)
    return ids, np.sin(ids.sum(axis=1)).astype(np.float32)[:, None]


def model(embedding: Any) -> Any:
    ids = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1))
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
    return keras.Model(ids, out(hidden(keras.layers.Flatten()(embedding(ids)))))


def schedule() -> Any:
    return keras.optimizers.schedules.CosineDecayRestarts(0.01, 60, t_mul=1.0, m_mul=0.9)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam, schedule": lambda: keras.optimizers.Adam(schedule()),
    "adamw": lambda: keras.optimizers.AdamW(0.003, weight_decay=0.05),
    "nesterov, clipped": lambda: keras.optimizers.SGD(schedule(), momentum=0.9, nesterov=True, global_clipnorm=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.002, momentum=0.8, centered=True),
}


def trained(optimizer: Any, **settings: Any) -> np.ndarray[Any, Any]:
    made = model(et.Embedding(ROWS, DIM, embeddings_initializer="ones", name="ids"))
    made.compile(optimizer, "mse")
    et.fit(made, records(), epochs=2, batch_size=BATCH, shuffle=False, seed=SEED, verbose=False, **settings)
    return np.asarray(made.get_layer("ids").read_rows(np.arange(ROWS)))


def trained_by_keras(optimizer: Any) -> np.ndarray[Any, Any]:
    # A regularizer that adds nothing makes the gradient dense: Keras squares un-summed slices (docs/lazy.md).
    nothing = keras.regularizers.L2(0.0)
    made = model(keras.layers.Embedding(ROWS, DIM, "ones", embeddings_regularizer=nothing, name="ids"))
    made.compile(optimizer, "mse")
    x, y = records()
    made.fit(x, y, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    return np.asarray(made.get_layer("ids").embeddings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_equals_one_of_plain_keras(name: str) -> None:
    theirs = trained_by_keras(OPTIMIZERS[name]())
    ours = trained(OPTIMIZERS[name](), lazy=False)
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    if name == "adamw":
        assert np.abs(trained(OPTIMIZERS[name]()) - theirs).max() > 1e-3  # lazy rows are others


def test_a_layer_says_so_itself() -> None:
    first = et.Embedding(ROWS, DIM, lazy=False, name="first")
    assert et.Embedding.from_config(first.get_config()).lazy is False
    ids = keras.Input((3,), dtype="int64")
    both = keras.layers.Concatenate()([first(ids), et.Embedding(ROWS, DIM, name="second")(ids)])
    made = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(both)))
    made.compile("adam", "mse")
    with et.MemoryStore() as store:
        et.fit(made, records(), batch_size=64, store=store, verbose=False)
        lazy = {name: spec.optimizer.lazy for name, spec in store.specs().items()}
    assert lazy == {"first": False, "second": True}


def test_fit_goes_on_where_it_ended() -> None:
    """To the bit, also in a store that is made anew: of rows that no batch has touched, which go on to decay, too."""
    made = model(et.Embedding(ROWS, DIM, embeddings_initializer="ones", name="ids"))
    made.compile(OPTIMIZERS["adamw"](), "mse")
    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "seed": SEED, "verbose": False, "lazy": False}
    for epoch in range(2):
        et.fit(made, records(), epochs=epoch + 1, initial_epoch=epoch, **settings)
    ours = np.asarray(made.get_layer("ids").read_rows(np.arange(ROWS)))
    assert np.array_equal(ours, trained(OPTIMIZERS["adamw"](), lazy=False))


def test_what_cannot_follow_every_step_is_refused() -> None:
    for optimizer, embedding, told in (
        ("ftrl", et.Embedding(ROWS, DIM), "'ftrl' has no dense-equivalent form"),
        ("muon", et.Embedding(ROWS, DIM), "'keras' has no dense-equivalent form"),
        ("adam", et.Embedding(ROWS, DIM, embeddings_constraint="non_neg", name="ids"), "'ids': embeddings_constraint"),
        ("adam", et.Embedding(ROWS, DIM, table_dtype="bfloat16", name="ids"), "'ids': lazy=False needs float32"),
    ):
        made = model(embedding)
        made.compile(optimizer, "mse")
        with pytest.raises(Unsupported, match=told):
            et.fit(made, records(), lazy=False, verbose=False)


def test_the_command_says_so(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(Path(click_job.__file__).read_text())
    for lazy in (True, False):
        with prepare_job(JobOptions(file, run_dir=tmp_path, lazy=lazy)).store as store:
            assert {spec.optimizer.lazy for spec in store.specs().values()} == {lazy}
    told = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    assert "--no-lazy" in told
