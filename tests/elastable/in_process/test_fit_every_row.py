"""`et.fit(lazy=False)` against plain Keras, which steps every row of every table at every step."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

import elastable as et
from elastable.command import app
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from tests.elastable import click_job
from tests.untyped import Keyword, Keywords

ROWS, DIM, BATCH, STEPS = 400, 6, 8, 120
SEED = 3


def records() -> tuple[Array, Array]:
    """Three ids a record, few of them often and most of them seldom, and some in no record."""
    random = np.random.default_rng(1)
    ids = np.minimum((random.pareto(0.5, (BATCH * STEPS // 2, 3))).astype(np.int64), ROWS - 20)
    return ids, np.sin(ids.sum(axis=1)).astype(np.float32)[:, None]


def model(embedding: keras.layers.Layer) -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1))
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
    return keras.Model(ids, out(hidden(keras.layers.Flatten()(embedding(ids)))))


def schedule() -> keras.optimizers.schedules.CosineDecayRestarts:
    return keras.optimizers.schedules.CosineDecayRestarts(0.01, 60, t_mul=1.0, m_mul=0.9)


OPTIMIZERS: dict[str, Callable[[], object]] = {
    "adam, schedule": lambda: keras.optimizers.Adam(schedule()),
    "adamw": lambda: keras.optimizers.AdamW(0.003, weight_decay=0.05),
    "nesterov, clipped": lambda: keras.optimizers.SGD(schedule(), momentum=0.9, nesterov=True, global_clipnorm=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.002, momentum=0.8, centered=True),
}


# A regularizer that adds nothing makes the gradient dense: Keras squares un-summed slices (docs/fit.md).
NOTHING = keras.regularizers.L2(0.0)


def trained(optimizer: object, **settings: Keyword) -> Array:
    return rows_after(et.fit, et.Embedding(ROWS, DIM, "ones", name="ids"), optimizer, seed=SEED, **settings)


def trained_by_keras(optimizer: object, regularizer: keras.regularizers.Regularizer = NOTHING) -> Array:
    layer = keras.layers.Embedding(ROWS, DIM, "ones", embeddings_regularizer=regularizer, name="ids")
    return rows_after(keras.Model.fit, layer, optimizer)


def rows_after(fit: Callable[..., object], layer: keras.layers.Layer, optimizer: object, **settings: Keyword) -> Array:
    made = model(layer)
    made.compile(optimizer, "mse")
    fit(made, *records(), epochs=2, batch_size=BATCH, shuffle=False, verbose=0, **settings)
    return np.asarray(layer.get_weights()[0])


@pytest.mark.sampled(2)
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
    settings: Keywords = {"batch_size": BATCH, "shuffle": False, "seed": SEED, "verbose": False, "lazy": False}
    for epoch in range(2):
        et.fit(made, records(), epochs=epoch + 1, initial_epoch=epoch, **settings)
    ours = np.asarray(made.get_layer("ids").read_rows(np.arange(ROWS)))
    assert np.array_equal(ours, trained(OPTIMIZERS["adamw"](), lazy=False))


def test_what_cannot_follow_every_step_is_refused() -> None:
    for optimizer, embedding, message in (
        ("ftrl", et.Embedding(ROWS, DIM), "'ftrl' has no dense-equivalent form"),
        ("muon", et.Embedding(ROWS, DIM), "'Muon' has no dense-equivalent form.*et.Embedding"),
        ("adam", et.Embedding(ROWS, DIM, table_dtype="bfloat16", name="ids"), "'ids': lazy=False needs float32"),
    ):
        made = model(embedding)
        made.compile(optimizer, "mse")
        with pytest.raises(Unsupported, match=message):
            et.fit(made, records(), lazy=False, verbose=False)


def test_the_command_says_so(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(Path(click_job.__file__).read_text())
    for lazy in (True, False):
        with prepare_job(JobOptions(file, run_dir=tmp_path, lazy=lazy)).store as store:
            assert {spec.optimizer.lazy for spec in store.specs().values()} == {lazy}
    output = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    assert "--no-lazy" in output


class TestWhatReachesTouchedRowsAlone:
    """Refused together with `lazy=False`, whoever says it; a layer may say otherwise."""

    @pytest.mark.parametrize("layer", [{}, {"lazy": False}], ids=["job", "layer"])
    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ({"embeddings_regularizer": "l2"}, r"'ids'.*embeddings_regularizer.*weight_decay=2\*l"),
            ({"embeddings_constraint": "non_neg"}, "'ids'.*embeddings_constraint.*lazy=True on the layer"),
        ],
        ids=["regularizer", "constraint"],
    )
    def test_it_is_refused_by_name(self, what: Keywords, message: str, layer: Keywords) -> None:
        made = model(et.Embedding(ROWS, DIM, name="ids", **what, **layer))
        made.compile("sgd", "mse")
        with pytest.raises(Unsupported, match=message):
            et.fit(made, records(), batch_size=BATCH, verbose=False, lazy=bool(layer))

    def test_a_layer_that_says_lazy_is_not_refused(self) -> None:
        both: Keywords = {"embeddings_regularizer": "l2", "embeddings_constraint": "non_neg"}
        made = model(et.Embedding(ROWS, DIM, name="ids", lazy=True, **both))
        made.compile("sgd", "mse")
        et.fit(made, records(), batch_size=BATCH, verbose=False, lazy=False)

    def test_l2_of_plain_sgd_is_the_weight_decay_that_the_message_names(self) -> None:
        regularizer, optimizer = keras.regularizers.L2(0.01), keras.optimizers.SGD(0.1, weight_decay=0.02)
        theirs = trained_by_keras(keras.optimizers.SGD(0.1), regularizer)
        layer = et.Embedding(ROWS, DIM, "ones", name="ids", optimizer=optimizer)
        ours = rows_after(et.fit, layer, keras.optimizers.SGD(0.1), lazy=False)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_constraint_is_first_kept_by_a_row_when_it_is_first_trained() -> None:
    # As docs/fit.md and the layer's own page say; Keras would have made the untouched rows 0.
    made = model(et.Embedding(ROWS + 1, DIM, "random_normal", embeddings_constraint="non_neg", name="ids"))
    made.compile("sgd", "mse")
    before = made.get_layer("ids").read_rows(np.arange(ROWS + 1))
    et.fit(made, records(), epochs=1, batch_size=BATCH, verbose=False)
    after = made.get_layer("ids").read_rows(np.arange(ROWS + 1))
    touched = np.unique(records()[0])
    assert (after[touched] >= 0).all()
    assert (before[ROWS] < 0).any()
    np.testing.assert_array_equal(after[ROWS], before[ROWS])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("initializer", "count"), [("zeros", 4), ("ones", 4), ("ones", 2)])
def test_rows_under_ftrl_have_the_numbers_that_docs_lazy_names(initializer: str, count: int) -> None:
    """Keras' own where rows begin at zero or are in the first batch; others are zero in Keras from the first step."""
    ids = np.array([[0, 1, 2], [1, 2, 0], [0, 3, 4], [3, 0, 1]])[:count]  # two batches: 3 and 4 come second, 5 never
    how: Keywords = {"epochs": 2, "batch_size": 2, "shuffle": False, "verbose": 0}
    tables = []
    for layer in (et.Embedding(6, DIM, initializer), keras.layers.Embedding(6, DIM, initializer, NOTHING)):
        made = model(layer)
        made.compile(keras.optimizers.Ftrl(0.5, l1_regularization_strength=1e-4), "mse")
        fit = et.fit if isinstance(layer, et.Embedding) else keras.Model.fit
        fit(made, ids, np.arange(count, dtype=np.float32), **how)
        tables.append(layer.get_weights()[0])
    ours, theirs = tables
    if initializer == "zeros":
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    elif count == 2:
        np.testing.assert_allclose(ours[:3], theirs[:3], rtol=1e-5, atol=1e-6)
    else:
        assert not theirs[5].any()
        np.testing.assert_array_equal(ours[5], np.ones(DIM, np.float32))
        assert np.abs(ours[3:5] - theirs[3:5]).max() > 0.01


def test_slots_go_on_when_lazy_is_changed(tmp_path: Path) -> None:
    """In the same process, of a loaded model and of loaded weights. A batch touches every row, so Keras is the same."""
    ids, targets = np.arange(20), np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
    settings: Keywords = {"batch_size": 20, "shuffle": False, "verbose": 0}

    def made(layer: type[keras.layers.Layer]) -> keras.Model:
        inputs = keras.Input((), dtype="int64")
        dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(1))
        built = keras.Model(inputs, dense(layer(20, 4, embeddings_initializer="ones", name="ids")(inputs)))
        built.compile(keras.optimizers.Adam(0.05), "mse")
        return built

    plain = made(keras.layers.Embedding)
    plain.fit(ids, targets, epochs=6, **settings)
    expected = plain.predict(ids, verbose=0)
    first = made(et.Embedding)
    et.fit(first, ids, targets, epochs=3, lazy=True, **settings)
    first.save(tmp_path / "model.keras")
    weights = made(et.Embedding)
    et.fit(weights, ids, targets, lazy=False, **settings)
    weights.load_weights(tmp_path / "model.keras")
    for each in (first, keras.models.load_model(tmp_path / "model.keras"), weights):
        et.fit(each, ids, targets, epochs=3, lazy=False, **settings)
        np.testing.assert_allclose(each.predict(ids, verbose=0), expected, rtol=1e-5, atol=1e-6)
