"""`et.Embedding(optimizer=)`: every table is trained by its own optimizer, with the numbers of Keras' own two."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import BadSpec, SpecConflict, Unsupported
from elastable.master.model.dense import DenseState
from elastable.master.model.discovery import discover_tables
from tests.elastable.small_models import DIM, USERS, WORDS, assert_close, assert_same, clicks, model_of, trained_by_tape
from tests.untyped import Keyword, Keywords

BATCH = 16
K = keras.optimizers


def decaying() -> object:
    return K.schedules.PiecewiseConstantDecay([2, 5], [0.5, 0.05, 0.2])


def model_with(users: object, words: object = None, **layer: Keyword) -> keras.Model:
    """The click model, its tables trained by these optimizers (None: the model's)."""
    return model_of(
        et.Embedding(USERS, DIM, name="users", embeddings_initializer="ones", optimizer=users, **layer),
        et.Embedding(WORDS, DIM, name="words", embeddings_initializer="ones", optimizer=words, **layer),
    )


def fitted(model: keras.Model, optimizer: keras.optimizers.Optimizer, epochs: int = 2, **how: Keyword) -> keras.Model:
    model.compile(optimizer, "binary_crossentropy")
    et.fit(model, clicks(BATCH * 4), epochs=epochs, batch_size=BATCH, shuffle=False, verbose=False, **how)
    return model


def by_hand(
    optimizer: keras.optimizers.Optimizer,
    users: keras.optimizers.Optimizer | None,
    words: keras.optimizers.Optimizer | None = None,
    epochs: int = 2,
) -> keras.Model:
    """Plain Keras: each optimizer applied to its own variables in a tape loop, ids' gradients summed."""
    own = {name: its for name, its in (("users", users), ("words", words)) if its is not None}
    return trained_by_tape(optimizer, clicks(BATCH * 4), BATCH, epochs, own=own)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda: K.SGD(0.5), lambda: K.Adagrad(0.1)),
        (lambda: K.Adam(0.01), lambda: K.SGD(decaying())),
        (lambda: K.SGD(decaying()), lambda: K.RMSprop(0.05, momentum=0.5)),
        (lambda: K.SGD(0.5, global_clipnorm=0.02), lambda: K.SGD(0.3)),
        (lambda: K.SGD(0.5), lambda: K.Adagrad(0.3, clipnorm=0.005)),
        (lambda: K.SGD(0.5, clipvalue=1e-3), lambda: K.SGD(0.3, global_clipnorm=0.01)),
        (lambda: K.SGD(0.5), lambda: K.SGD(0.3, clipvalue=5e-4)),
        (lambda: K.SGD(0.5), lambda: K.AdamW(0.05, weight_decay=0.1)),
    ],
)
def test_two_optimizers_give_the_numbers_of_kerass_two(make: Callable[..., object], own: Callable[..., object]) -> None:
    # Every row follows every step, as in Keras.
    assert_close(fitted(model_with(own(), lazy=False), make()), by_hand(make(), own()))


@pytest.mark.parametrize("given", ["adagrad", keras.optimizers.serialize(K.Adagrad(0.3))], ids=["name", "config"])
def test_a_name_or_a_config_will_do(given: object) -> None:
    ours = fitted(model_with(given, given), K.SGD(0.5))
    assert_close(ours, by_hand(K.SGD(0.5), K.get(given), K.get(given)))


def test_the_models_optimizer_need_not_suit_tables_that_have_their_own() -> None:
    # Lamb joins the rows of a table, and is refused where it would have to train one.
    ours = fitted(model_with(K.SGD(0.3), K.SGD(0.3)), K.Lamb(0.01))
    assert_close(ours, by_hand(K.Lamb(0.01), K.SGD(0.3), K.SGD(0.3)))
    with pytest.raises(Unsupported, match="Lamb does not treat the rows"):
        fitted(model_with(K.SGD(0.3)), K.Lamb(0.01))


def test_micro_batches_are_averaged_before_the_tables_own_step() -> None:
    model = model_with(K.Adagrad(0.3, clipnorm=0.01))
    model.compile(K.SGD(0.5), "binary_crossentropy")
    records = clicks(BATCH * 4)
    et.fit(model, records, epochs=2, batch_size=BATCH // 4, grads_to_wait=4, shuffle=False, verbose=False)
    assert_close(model, by_hand(K.SGD(0.5), K.Adagrad(0.3, clipnorm=0.01)))


class TestGoingOn:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("rate", [lambda: 0.1, decaying], ids=["constant", "schedule"])
    @pytest.mark.parametrize("held", [False, True], ids=["own store", "given store"])
    def test_a_second_fit_goes_on(self, rate: Callable[..., object], held: bool) -> None:
        once = fitted(model_with(K.Adam(rate())), K.Adam(rate()), epochs=4)
        stores: Keywords = {"store": et.MemoryStore()} if held else {}
        twice = fitted(model_with(K.Adam(rate())), K.Adam(rate()), **stores)
        et.fit(twice, clicks(BATCH * 4), epochs=2, batch_size=BATCH, shuffle=False, verbose=False, **stores)
        assert_same(twice, once)

    @pytest.mark.parametrize("held", [False, True], ids=["own store", "given store"])
    def test_compiled_anew_the_optimizer_begins_anew(self, held: bool) -> None:
        stores: Keywords = {"store": et.MemoryStore()} if held else {}
        ours = fitted(fitted(model_with(None), K.Adagrad(0.3), **stores), K.Adagrad(0.3), **stores)
        theirs = by_hand(K.Adagrad(0.3), None)
        theirs.compile(K.Adagrad(0.3), "binary_crossentropy")
        assert_close(ours, trained_by_tape(theirs.optimizer, clicks(BATCH * 4), BATCH, model=theirs), 1e-4)

    def test_a_rate_that_a_callback_assigned_belongs_to_the_version(self) -> None:
        model = model_with(K.Adagrad(0.3))
        model.compile(K.SGD(0.5), "binary_crossentropy")
        saved = DenseState(model).tensors()
        assert saved["table_learning_rates/00000"] == np.float32(0.3)
        model.get_layer("users").optimizer.learning_rate = 0.1
        changed = DenseState(model)
        assert changed.steps()[0].own["users"].rate == pytest.approx(0.1)
        changed.restore(saved)
        assert changed.steps()[0].own["users"].rate == pytest.approx(0.3)


class TestCallbacks:
    def test_schedulers_reach_the_models_optimizer_and_not_the_tables(self) -> None:
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.1)
        ours = fitted(model_with(K.SGD(0.3)), K.SGD(0.5), epochs=1, callbacks=[scheduler])
        assert_close(ours, by_hand(K.SGD(0.05), K.SGD(0.3), epochs=1))
        assert float(ours.get_layer("users").optimizer.learning_rate) == pytest.approx(0.3)

    def test_a_callback_may_assign_a_tables_rate(self) -> None:
        class Slower(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
                self.model.get_layer("users").optimizer.learning_rate = 0.1

        ours = fitted(model_with(K.SGD(0.3)), K.SGD(0.5), callbacks=[Slower()])
        assert_close(ours, by_hand(K.SGD(0.5), K.SGD(0.1)))


class TestConfig:
    @pytest.mark.parametrize("own", [lambda: K.Adagrad(0.3, clipnorm=1.0), lambda: K.SGD(decaying())])
    def test_it_is_part_of_the_layers_config(self, own: Callable[..., object]) -> None:
        layer = et.Embedding(USERS, DIM, name="users", optimizer=own())
        again = et.Embedding.from_config(layer.get_config())
        assert again.get_config() == layer.get_config()
        assert type(again.optimizer) is type(layer.optimizer)
        assert et.Embedding(USERS, DIM).get_config()["optimizer"] is None

    def test_a_saved_model_keeps_it(self, tmp_path: Path) -> None:
        model = fitted(model_with(K.Adagrad(0.3)), K.SGD(0.5))
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert float(again.get_layer("users").optimizer.learning_rate) == pytest.approx(0.3)
        records = clicks(BATCH * 4)
        np.testing.assert_array_equal(again.predict(records[0], verbose=0), model.predict(records[0], verbose=0))


class TestRefused:
    def test_what_is_no_optimizer(self) -> None:
        with pytest.raises(BadSpec, match=r"embedding layer 'users': optimizer 'adagradd'.*keras\.optimizers\.Adagrad"):
            et.Embedding(USERS, DIM, name="users", optimizer="adagradd")

    @pytest.mark.parametrize(
        ("own", "message"),
        [
            (lambda: K.Lamb(0.1), "'users': optimizer Lamb does not treat the rows"),
            (lambda: K.SGD(lambda: 0.1), "'users': .*function as learning rate"),
        ],
    )
    def test_what_a_table_cannot_use_names_the_layer(self, own: Callable[..., object], message: str) -> None:
        with pytest.raises(Unsupported, match=message):
            fitted(model_with(own()), K.SGD(0.5))

    @pytest.mark.parametrize(
        ("one", "other", "message"),
        [
            (K.SGD(0.1), K.Adagrad(0.1), "SGD.*Adagrad"),
            (K.SGD(0.1), K.SGD(0.2), "0.1.*0.2"),
            (K.SGD(0.1), None, r"SGD.*the model's own, from compile\(\)"),
            (K.SGD(K.schedules.ExponentialDecay(0.1, 1, 0.9)), K.SGD(K.schedules.ExponentialDecay(0.1, 1, 0.8)), "0.8"),
        ],
    )
    def test_layers_that_share_a_table_and_not_its_optimizer(self, one: object, other: object, message: str) -> None:
        with pytest.raises(SpecConflict, match=f"'first' and 'second' share the table 't'.*{message}"):
            discover_tables(sharing(one, other), 0)

    def test_layers_that_share_a_table_and_its_optimizer(self) -> None:
        assert list(discover_tables(sharing(K.SGD(0.1), K.SGD(0.1)), 0)) == ["t"]

    def test_a_table_on_the_workers(self) -> None:
        everywhere = et.TensorLocationSettings(et.TensorLocation("memory"), min_elements_for_off_worker=10_000)
        with pytest.raises(Unsupported, match=r"'users'.*placed on the workers.*Adagrad.*place the table in a store"):
            fitted(model_with(K.Adagrad(0.3)), K.SGD(0.5), locations=et.LocationSettings(everywhere, everywhere))


def sharing(one: object, other: object) -> keras.Model:
    layers = [
        et.Embedding(9, 2, table="t", name=name, optimizer=own) for name, own in (("first", one), ("second", other))
    ]
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(layers[0](ids) + layers[1](ids)))
    model.compile("sgd", "mse")
    return model
