"""A layer's rows as its weight, where plain Keras has nothing to compare with, or the rows are refused."""

import os
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, BadInput, BadSpec, IdOutOfRange, ModelError, Unsupported
from tests.elastable import one_table

ROWS, DIM = 20, 4
IDS = np.random.default_rng(0).integers(0, ROWS, (32, 2))
Y = np.ones((32, 1), np.float32)
MATRIX = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)
EVERY = np.arange(ROWS)


def model_of(layer: keras.layers.Layer, loss: object = "mse") -> keras.Model:
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))
    model.compile(keras.optimizers.Adagrad(0.1), loss)
    return model


def fit(model: keras.Model, **options: object) -> list[float]:
    history = model.fit(IDS, Y, batch_size=8, shuffle=False, verbose=0, **options).history
    return list(history["loss"])


def test_the_rows_of_a_distributed_embedding_are_weights() -> None:
    start = keras.initializers.Constant(MATRIX)
    tables = [et.TableConfig(name, ROWS, DIM, initializer=start, optimizer="sgd") for name in ("a", "b")]
    layer = et.DistributedEmbedding(
        {table.name: et.FeatureConfig(table.name, table, (8,), (8, DIM)) for table in tables}
    )
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("a", "b")}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(layer(inputs).values()))))
    model.compile("sgd", "mse")
    assert [tuple(weight.shape) for weight in layer.weights] == [(ROWS, DIM)] * 2
    begun = model.get_weights()
    np.testing.assert_array_equal(begun[0], MATRIX)
    x = {name: IDS[:, number] for number, name in enumerate(inputs)}
    history = [model.fit(x, Y, batch_size=8, shuffle=False, verbose=0).history["loss"] for _ in range(2)]
    assert history[0] != history[1]
    model.set_weights(begun)
    assert model.fit(x, Y, batch_size=8, shuffle=False, verbose=0).history["loss"] == history[0]


DYNAMIC = {
    "get_weights": lambda model, layer: model.get_weights(),
    "layer.get_weights": lambda model, layer: layer.get_weights(),
    "numpy": lambda model, layer: layer.weights[0].numpy(),
    "as a tensor": lambda model, layer: keras.ops.sum(layer.weights[0]),
    "layer.set_weights": lambda model, layer: layer.set_weights([MATRIX]),
    "assign": lambda model, layer: layer.embeddings.assign(MATRIX),
    "assign_add": lambda model, layer: layer.embeddings.assign_add(MATRIX),
    "len": lambda model, layer: len(layer.embeddings),
}


@pytest.mark.parametrize("use", DYNAMIC)
def test_a_table_of_any_id_has_no_matrix(use: str) -> None:
    layer = et.Embedding(None, DIM, name="any")
    model = model_of(layer)
    with pytest.raises(Unsupported, match=r"'any': its table takes any int64 id.*layer.read_rows\(ids\).*write_rows"):
        DYNAMIC[use](model, layer)
    assert model.count_params() == 2 * DIM + 1


def test_a_penalty_over_a_table_of_any_id_is_refused_in_a_fit() -> None:
    layer = et.Embedding(None, DIM, name="any")

    def loss(true: keras.KerasTensor, predicted: keras.KerasTensor) -> keras.KerasTensor:
        penalty = sum(keras.ops.sum(keras.ops.square(weight)) for weight in model.trainable_variables)
        return keras.ops.mean(keras.ops.square(true - predicted)) + penalty

    model = model_of(layer, loss)
    with pytest.raises(ModelError, match="'any': its table takes any int64 id"):
        fit(model)


def test_a_table_above_the_setting_is_read_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = et.Embedding(ROWS, DIM, name="large", weights=MATRIX)
    model = model_of(layer)
    monkeypatch.setenv("ELASTABLE_LARGEST_MATRIX_BYTES", str(MATRIX.nbytes - 1))
    shown = rf"'large': all its rows take {MATRIX.nbytes} bytes, .* of at most {MATRIX.nbytes - 1} bytes"
    for read in (model.get_weights, layer.embeddings.numpy, lambda: keras.ops.sum(layer.weights[0])):
        with pytest.raises(Unsupported, match=rf"{shown}.*read_rows\(ids\).*LARGEST_MATRIX_BYTES={MATRIX.nbytes}"):
            read()
    layer.set_weights([2 * MATRIX])
    np.testing.assert_array_equal(layer.read_rows(EVERY), 2 * MATRIX)
    monkeypatch.setenv("ELASTABLE_LARGEST_MATRIX_BYTES", str(MATRIX.nbytes))
    np.testing.assert_array_equal(layer.get_weights()[0], 2 * MATRIX)
    monkeypatch.setenv("ELASTABLE_LARGEST_MATRIX_BYTES", "much")
    with pytest.raises(BadInput, match="ELASTABLE_LARGEST_MATRIX_BYTES='much': need a number of bytes"):
        model.get_weights()


def test_rows_are_not_assigned_within_a_step() -> None:
    layer = et.Embedding(ROWS, DIM, name="inner", weights=MATRIX)

    def loss(true: keras.KerasTensor, predicted: keras.KerasTensor) -> keras.KerasTensor:
        layer.embeddings.assign(MATRIX * 0)
        return keras.ops.mean(keras.ops.square(true - predicted))

    with pytest.raises(ModelError, match=r"'inner': its rows are assigned within a step.*on_epoch_end"):
        fit(model_of(layer, loss))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("attribute", "value"), [("constraint", keras.constraints.NonNeg()), ("regularizer", keras.regularizers.L2(0.1))]
)
@pytest.mark.parametrize("offload_above", [0, 9])
def test_what_is_set_on_the_weight_counts_as_in_keras(attribute: str, value: object, offload_above: int) -> None:
    models, whole = [], len(one_table.IDS)
    for table in (one_table.plain_table(), one_table.plain_table() if offload_above else one_table.own_table()):
        model = one_table.model_of(table, keras.optimizers.SGD(0.3))
        table.set_weights([one_table.START])
        setattr(table.embeddings, attribute, value)
        models.append(model)
    models[0].fit(one_table.IDS, one_table.TARGETS, batch_size=whole, epochs=2, verbose=0)
    et.fit(
        models[1], one_table.IDS, one_table.TARGETS, batch_size=whole, epochs=2, verbose=0,
        offload_embeddings_above=offload_above,
    )  # fmt: skip
    one_table.assert_same(models[1], models[0])


def test_slots_stay_where_rows_are_assigned() -> None:
    layer = et.Embedding(ROWS, DIM, weights=MATRIX)
    model = model_of(layer)
    fit(model)
    store = layer.source
    assert isinstance(store, EmbeddingStore)
    before = next(iter(store.scan(layer.table_name)))
    layer.set_weights([MATRIX])
    after = next(iter(store.scan(layer.table_name)))
    np.testing.assert_array_equal(after.slots[np.searchsorted(after.ids, before.ids)], before.slots)
    np.testing.assert_array_equal(layer.get_weights()[0], MATRIX)


@pytest.mark.parametrize("trained", [False, True])
def test_rows_are_written_by_id(trained: bool) -> None:
    layers = [et.Embedding(ROWS, DIM, weights=MATRIX), et.Embedding(None, DIM), et.Embedding(ROWS, DIM, "zeros")]
    for layer in layers:
        model = model_of(layer)
        if trained:
            fit(model)
        before = layer.read_rows(EVERY)
        layer.write_rows(np.array([7, 3]), MATRIX[:2])
        np.testing.assert_array_equal(layer.read_rows(np.array([7, 3])), MATRIX[:2])
        others = np.setdiff1d(EVERY, [3, 7])
        np.testing.assert_array_equal(layer.read_rows(others), before[others])
        if trained:
            continue
        fit(model)
        assert (layer.read_rows(np.array([7])) != MATRIX[0]).any() == (7 in IDS)


REFUSED: list[tuple[type[Exception], str, Callable[[et.Embedding], object]]] = [
    (BadIds, "each id once", lambda layer: layer.write_rows(np.array([1, 1]), MATRIX[:2])),
    (IdOutOfRange, "20", lambda layer: layer.write_rows(np.array([ROWS]), MATRIX[:1])),
    (BadInput, r"\(1, 4\) for 2 ids", lambda layer: layer.write_rows(np.array([1, 2]), MATRIX[:1])),
    (BadInput, r"\(5, 4\)", lambda layer: layer.embeddings.assign(MATRIX[:5])),
    (BadInput, r"\(3,\)|\(5, 4\)", lambda layer: layer.embeddings.assign_add(MATRIX[:5])),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_no_rows_is_refused(number: int) -> None:
    error, message, write = REFUSED[number]
    layer = et.Embedding(ROWS, DIM, weights=MATRIX)
    with pytest.raises((error, ValueError), match=message):
        write(layer)
    np.testing.assert_array_equal(layer.read_rows(EVERY), MATRIX)


def test_a_constant_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadSpec, match=r"'misfit': Constant of shape \(3, 4\) for a table of shape \(20, 4\)"):
        et.Embedding(ROWS, DIM, keras.initializers.Constant(MATRIX[:3]), name="misfit").read_rows(EVERY)
    with pytest.raises(Unsupported, match="for a table of any id; use one number, or write rows by id"):
        model_of(et.Embedding(None, DIM, keras.initializers.Constant(MATRIX)))


def test_layers_that_share_a_table_begin_with_the_rows_that_one_was_given() -> None:
    def towers(second: Float32 | None) -> tuple[keras.Model, list[et.Embedding]]:
        layers = [et.Embedding(ROWS, DIM, "zeros", table="both", name=name) for name in ("one", "two")]
        ids = keras.Input((2,), dtype="int64")
        rows = keras.layers.Add()([layer(ids) for layer in layers])
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        layers[1].set_weights([MATRIX])
        if second is not None:
            layers[0].set_weights([second])
        return model, layers

    model, layers = towers(None)
    fit(model)
    np.testing.assert_array_equal(layers[0].get_weights()[0], MATRIX)
    model, layers = towers(MATRIX + 1)
    with pytest.raises(BadInput, match="'one' and 'two' share the table 'both' and were given different rows"):
        fit(model)


def test_half_rows_are_rounded_when_they_are_assigned() -> None:
    layer = et.Embedding(ROWS, DIM, table_dtype="bfloat16")
    layer.build()
    layer.set_weights([MATRIX])
    np.testing.assert_array_equal(layer.get_weights()[0], np.asarray(tf.cast(tf.cast(MATRIX, tf.bfloat16), tf.float32)))


def test_state_trees_are_refused() -> None:
    model = model_of(et.Embedding(ROWS, DIM))
    for use in (model.get_state_tree, lambda: model.set_state_tree({})):
        with pytest.raises(Unsupported, match=r"slots of tables are in their store; use model\.save"):
            use()


def test_state_of_an_optimizer_by_hand_is_refused_where_it_lacks_slots() -> None:
    model = one_table.model_of(one_table.own_table())
    one_table.train(model)
    plain = one_table.model_of(one_table.plain_table())
    one_table.train(plain)
    state: dict[str, Float32] = {}
    with pytest.raises(Unsupported, match=r"save_own_variables of the optimizer 'adam.*': the slots .* use model.save"):
        model.optimizer.save_own_variables(state)
    dense = {str(number): np.array(each) for number, each in enumerate(model.optimizer.variables)}
    with pytest.raises(Unsupported, match=r"load_own_variables of the optimizer 'adam.*': .* a new optimizer"):
        model.optimizer.load_own_variables(dense)
    plain.optimizer.save_own_variables(state)
    model.optimizer.load_own_variables(state)
    model.set_weights(plain.get_weights())
    for each in (model, plain):
        one_table.train(each)
    one_table.assert_same(model, plain)


def test_a_saved_model_holds_the_rows_once(tmp_path: Path) -> None:
    layer = et.Embedding(30_000, 8, weights=np.random.default_rng(0).normal(size=(30_000, 8)).astype(np.float32))
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.export(str(tmp_path / "served"), verbose=False)
    size = sum(os.path.getsize(f"{folder}/{name}") for folder, _, names in os.walk(tmp_path) for name in names)
    assert size < 1.5 * 30_000 * 8 * 4
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_array_equal(served.serve(tf.constant(IDS)), model.predict(IDS, verbose=0))


def test_a_checkpoint_of_tensorflow_holds_tables_of_any_id(tmp_path: Path) -> None:
    layer = et.Embedding(None, DIM, name="any")
    model = model_of(layer)
    fit(model)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "kept"))
    on, rows = fit(model), layer.read_rows(EVERY)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_consumed()
    assert fit(model) == on
    np.testing.assert_array_equal(layer.read_rows(EVERY), rows)


class Listing(keras.Model):
    """Its embedding is in a list, where TensorFlow's checkpoints find what an optimizer holds."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__()
        self.tables = [layer]
        self.out = keras.layers.Dense(1)

    def call(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        return self.out(keras.ops.mean(self.tables[0](ids), axis=1))


def distributed() -> keras.Model:
    table = et.TableConfig("listed", ROWS, DIM, combiner="mean")
    layer = et.DistributedEmbedding([et.FeatureConfig("ids", table, (8, 2), (8, DIM))])
    ids = keras.Input((2,), dtype="int64")
    return keras.Model(ids, keras.layers.Dense(1)(layer([ids])[0]))


@pytest.mark.parametrize("make", [lambda: Listing(et.Embedding(ROWS, DIM, weights=MATRIX)), distributed])
def test_a_checkpoint_of_tensorflow_finds_tables_in_lists(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    model = make()
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    fit(model)
    before = model.get_weights()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "kept"))
    on = fit(model)
    checkpoint.restore(path)
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert fit(model) == on


def test_a_checkpoint_of_an_offloaded_table_is_restored_before_it_is_offloaded_again(tmp_path: Path) -> None:
    def trained(path: str | None) -> tuple[str, keras.Model]:
        model = model_of(keras.layers.Embedding(ROWS, DIM, name="moved"))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        if path is not None:
            checkpoint.restore(path)
        et.fit(model, IDS, Y, batch_size=8, shuffle=False, verbose=0, offload_embeddings_above=1)
        saved = checkpoint.save(str(tmp_path / "kept")) if path is None else path
        return saved, model

    path, first = trained(None)
    et.fit(first, IDS, Y, batch_size=8, shuffle=False, verbose=0, offload_embeddings_above=1)
    _, second = trained(path)
    for weight, expected in zip(second.get_weights(), first.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_an_optimizer_that_is_replaced_without_compile_is_refused() -> None:
    keras.utils.set_random_seed(1)
    model, x, y = keras.Sequential([et.Embedding(ROWS, DIM), keras.layers.Dense(1)]), np.arange(ROWS), np.ones(ROWS)
    model.compile("adagrad", "mse")
    model.optimizer = keras.optimizers.SGD(0.0)  # as in Keras, where nothing has trained yet
    model.fit(x, y, verbose=0)
    start = model.get_weights()
    model.fit(x, y, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], start[0])
    model.optimizer = keras.optimizers.SGD(0.1)
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(Unsupported, match=r"its optimizer was replaced by 'sgd.*model.compile"):
            train(x, y)
    model.compile(model.optimizer, "mse")
    model.fit(x, y, verbose=0)


def test_variables_of_16_bits_are_refused_and_doubles_draw_as_in_keras() -> None:
    with pytest.raises(Unsupported, match=r"'half': dtype='bfloat16' keeps weights in 16 bits.*mixed_bfloat16"):
        et.Embedding(ROWS, DIM, dtype="bfloat16", name="half")
    drawn = []
    for kind in (et.Embedding, keras.layers.Embedding):
        keras.utils.set_random_seed(3)
        layer = kind(ROWS, DIM, dtype="float64")
        layer.build()
        drawn.append(layer.get_weights()[0].astype(np.float32))
    np.testing.assert_array_equal(*drawn)


def test_rows_of_strings_are_read_and_written_by_strings() -> None:
    layer = et.Embedding(None, DIM)
    layer.write_rows(["x", "y"], MATRIX[:2])
    np.testing.assert_array_equal(layer.read_rows(np.array([["y"], ["x"]], object))[:, 0], MATRIX[[1, 0]])
    np.testing.assert_array_equal(layer(tf.constant(["x"])), MATRIX[:1])


def test_weights_of_a_table_of_any_id_are_refused_before_they_fail() -> None:
    model = model_of(et.Embedding(None, DIM, name="any"))
    with pytest.raises(Unsupported, match=r"'any': its table takes any int64 id.*layer\.write_rows"):
        model.set_weights([np.ones((ROWS, DIM)), *model.layers[-1].get_weights()])
    board = keras.callbacks.TensorBoard("unused", histogram_freq=1)
    with pytest.raises(Unsupported, match=r"callback TensorBoard\(histogram_freq=1\): embedding layer 'any'"):
        fit(model, callbacks=[board])


BY_HAND = pytest.raises(Unsupported, match=r"of the optimizer 'adam.*' is assigned, .* with a new optimizer")


@pytest.mark.parametrize("way", ["fit", "batches", "offloaded", "built", "loaded"])
def test_slots_that_a_program_assigns_are_refused(way: str, tmp_path: Path) -> None:
    model = one_table.model_of(one_table.plain_table() if way == "offloaded" else one_table.own_table())
    if way == "batches":
        model.train_on_batch(one_table.IDS, one_table.TARGETS)
    elif way == "built":
        model.optimizer.build(model.trainable_variables)
    else:
        et.fit(model, (one_table.IDS, one_table.TARGETS), batch_size=8, offload_embeddings_above=1)
    if way == "loaded":
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    model.optimizer.iterations.assign(1)  # alone it is what the steps of tables are counted by, too
    slots = [each for each in model.optimizer.variables if len(each.shape)]
    for each in slots:
        each.assign(np.array(each))
        with BY_HAND:
            each.assign(np.array(each) + 1.0)
    with BY_HAND:
        slots[0].assign_add(np.ones(slots[0].shape))


def test_slots_may_be_assigned_where_tables_have_an_optimizer_of_their_own() -> None:
    model = model_of(et.Embedding(ROWS, DIM, optimizer=keras.optimizers.SGD(0.1)))
    fit(model)
    slots = [each for each in model.optimizer.variables if len(each.shape)]
    for each in slots:
        each.assign(np.ones(each.shape))
    fit(model)


def test_slots_that_a_callback_assigns_are_refused() -> None:
    model = one_table.model_of(one_table.own_table())

    class Restart(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            for each in self.model.optimizer.variables:
                each.assign(np.zeros(each.shape))

    with BY_HAND:
        one_table.train(model, epochs=2, callbacks=[Restart()])


@pytest.mark.parametrize("given", ["weights", "constant"])
def test_rows_that_are_given_are_copied_as_the_layer_is_built(given: str) -> None:
    rows = MATRIX.copy()
    start = {"weights": [rows]} if given == "weights" else {"embeddings_initializer": keras.initializers.Constant(rows)}
    model = model_of(et.Embedding(ROWS, DIM, **start))
    rows[:] = 0.0
    np.testing.assert_array_equal(model.get_weights()[0], MATRIX)


def test_a_checkpoint_of_a_list_of_weights_has_the_rows(tmp_path: Path) -> None:
    model = model_of(et.Embedding(ROWS, DIM, weights=[MATRIX]))
    checkpoint = tf.train.Checkpoint(weights=model.trainable_variables, one=model.layers[1].embeddings)
    path = checkpoint.write(str(tmp_path / "weights"))
    fit(model)
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(model.get_weights()[0], MATRIX)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", ["predict", "evaluate", "predict_on_batch", "test_on_batch"])
def test_what_was_traced_before_offloading_reads_the_rows_after_it(before: str) -> None:
    model = model_of(keras.layers.Embedding(ROWS, DIM))
    by_hand = tf.function(model.layers[1])
    by_hand(IDS)
    use = getattr(model, before)
    arguments = (IDS,) if before.startswith("predict") else (IDS, Y)
    old = use(*arguments)
    et.fit(model, (IDS, Y), batch_size=8, offload_embeddings_above=1)
    new = use(*arguments)
    assert not np.allclose(old, new)
    expected = np.asarray(model(IDS)) if before.startswith("predict") else np.mean((np.asarray(model(IDS)) - Y) ** 2)
    np.testing.assert_allclose(new, expected, rtol=1e-5)
    assert np.isnan(by_hand(IDS)).all()  # a trace of the program's own: not the rows of old
