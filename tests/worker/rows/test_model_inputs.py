"""Floats as ids: exact where they are integers, else refused by input, record and value, on every way into a model."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadIds, BadInput, IdOutOfRange, ModelError, Unsupported
from elastable.worker.user_model.build import as_tensors, for_model
from tests.untyped import Keyword

BIG = 2**24 + 1  # float32 makes 2**24 of it
Y = np.ones((4, 1), np.float32)
BAD = [(np.nan, "nan"), (np.inf, "inf"), (1.7, "1.7"), (2.0**53, r"9007199254740992|9.00719925e\+15")]


def made(size: int | None = None, dtype: str = "int64", **layer: Keyword) -> keras.Model:
    item = keras.Input((), dtype=dtype, name="item")
    rows = et.Embedding(size, 3, name="rows", **layer)(item)
    model = keras.Model({"item": item}, keras.layers.Dense(1, kernel_initializer="ones")(rows))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


# What is refused leaves a model as it was: those that are only read or refused are shared.


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return made()


@pytest.fixture(scope="module")
def floats() -> keras.Model:
    return made(2**24, "float32")


@pytest.fixture(scope="module")
def narrow() -> keras.Model:
    return made(dtype="int32")


@pytest.fixture(scope="module")
def few() -> keras.Model:
    return made(10)


@pytest.fixture(scope="module")
def strings() -> keras.Model:
    return made(dtype="string")


def test_a_masked_value_is_none(model: keras.Model) -> None:
    column = np.ma.masked_array([1, 2, 3, 4], [False, False, True, False])
    for face in (FACES["a call"], FACES["predict"], LOSSES["evaluate"], TRAINING["model.fit"]):
        with pytest.raises(BadIds, match=r"item.*position 2 is masked"):
            face(model, column)
    np.testing.assert_array_equal(FACES["predict"](model, column[:2]), FACES["predict"](model, np.array([1, 2])))


def dataset(column: Array, *targets: Array) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(({"item": column}, *targets)).batch(4)


FACES: dict[str, Callable[[keras.Model, Array], Any]] = {
    "a call": lambda model, column: np.asarray(model({"item": column})),
    "predict": lambda model, column: model.predict({"item": column}, verbose=0),
    "predict of tf.data": lambda model, column: model.predict(dataset(column), verbose=0),
    "predict_on_batch": lambda model, column: model.predict_on_batch({"item": column}),
}
LOSSES: dict[str, Callable[[keras.Model, Array], object]] = {
    "evaluate": lambda model, column: model.evaluate({"item": column}, Y, verbose=0),
    "evaluate of tf.data": lambda model, column: model.evaluate(dataset(column, Y), verbose=0),
    "test_on_batch": lambda model, column: model.test_on_batch({"item": column}, Y),
}
TRAINING: dict[str, Callable[[keras.Model, Array], object]] = {
    "model.fit": lambda model, column: model.fit({"item": column}, Y, verbose=0),
    "model.fit of tf.data": lambda model, column: model.fit(dataset(column, Y), verbose=0),
    "et.fit": lambda model, column: et.fit(model, {"item": column}, Y, verbose=False),
    "validation_data": lambda model, column: model.fit(
        {"item": np.ones(4, np.float32)}, Y, validation_data=({"item": column}, Y), verbose=0
    ),
    "train_on_batch": lambda model, column: model.train_on_batch({"item": column}, Y),
}
READING = {**FACES, **LOSSES}
EVERY = {**READING, **TRAINING}
# One function looks at what comes in at each: those are all of them, and these the ones that hand it on in their way.
DOORS = ("a call", "predict of tf.data", "evaluate", "et.fit")


@pytest.mark.parametrize("face", FACES)
def test_doubles_that_are_integers_are_exact(model: keras.Model, face: str) -> None:
    ids = np.array([BIG, 3, -7, 2**40 + 1])
    found = FACES[face](model, ids.astype(np.float64))
    np.testing.assert_array_equal(found, model.predict({"item": ids}, verbose=0))


@pytest.mark.parametrize("face", EVERY)
def test_doubles_that_are_no_ids_are_refused(model: keras.Model, face: str) -> None:
    for value, message in BAD if face in DOORS else BAD[:1]:
        with pytest.raises(BadIds, match=r"input 'item'.*record 2|record 2.*item") as found:
            EVERY[face](model, np.array([1.0, 2.0, value, 3.0]))
        assert re.search(message, str(found.value))


@pytest.mark.parametrize("face", TRAINING)
def test_training_moves_the_row_of_the_very_id(face: str) -> None:
    trained = made(embeddings_initializer="zeros")
    TRAINING[face](trained, np.full(4, float(BIG)))
    moved = {number: bool(trained.get_layer("rows").read_rows(number).any()) for number in (BIG, BIG - 1)}
    assert moved == {BIG: face != "validation_data", BIG - 1: False}


@pytest.mark.parametrize("face", FACES)
def test_a_float_input_works_where_it_holds_every_id(floats: keras.Model, face: str) -> None:
    ids = np.array([0, 1, 5, 2**24 - 1])
    wanted = floats.get_layer("rows").read_rows(ids).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(FACES[face](floats, ids.astype(np.float32)), wanted, rtol=1e-5)


@pytest.mark.parametrize("face", DOORS)
def test_a_float_input_refuses_what_is_no_id(floats: keras.Model, face: str) -> None:
    for value, message in ((0.5, r"0\.5"), (np.nan, "nan"), (float(BIG), "16777216")):
        with pytest.raises(BadIds, match=rf"'rows': id {message}.* of record 1 .*no integer below 2\*\*24"):
            EVERY[face](floats, np.array([1, value, 2, 3], np.float32))


def test_training_on_a_float_input_names_the_column_and_the_record_of_all(floats: keras.Model) -> None:
    column = np.where(np.arange(40) == 37, 0.5, 1).astype(np.float32)
    with pytest.raises(BadIds, match=r"x\['item'\]: embedding layer 'rows': id 0.5 of record 37 is no integer"):
        floats.fit({"item": column}, np.ones((40, 1)), batch_size=4, shuffle=False, verbose=0)


def test_a_float_input_that_cannot_hold_every_id_is_refused() -> None:
    with pytest.raises(BadIds, match=r"'rows': float32 holds every integer only below 2\*\*24.*16777217.*int64"):
        made(BIG, "float32").fit({"item": np.ones(4, np.float32)}, Y, verbose=0)


@pytest.mark.parametrize("face", DOORS)
def test_an_input_of_32_bits_refuses_what_it_would_cut(narrow: keras.Model, face: str) -> None:
    with pytest.raises(BadIds, match=r"input 'item'.*4294967301.*int32"):
        EVERY[face](narrow, np.array([1, 2, 2**32 + 5, 3]))


@pytest.mark.parametrize("face", DOORS[:3])
def test_an_id_out_of_range_is_named_with_layer_and_record(few: keras.Model, face: str) -> None:
    with pytest.raises(IdOutOfRange, match=r"'rows': id 10 of record 2 of the batch is outside 0 <= id < 10"):
        READING[face](few, np.array([1, 2, 10, 3]))


@pytest.mark.parametrize("face", FACES)
def test_strings_of_numpy_are_read(strings: keras.Model, face: str) -> None:
    rows = strings.get_layer("rows").read_rows(et.hash_ids(["a", "bc", "a", "d"]))
    for kind in ("U", "S", "O"):
        found = FACES[face](strings, np.array(["a", "bc", "a", "d"]).astype(kind))
        np.testing.assert_allclose(np.asarray(found)[:, 0], rows.sum(axis=1), rtol=1e-5)


def test_a_sequential_model_that_is_not_built_refuses_a_fraction() -> None:
    with pytest.raises(BadIds, match=r"input 'rows': record 1: 1.7 is no integer; the input takes int64"):
        keras.Sequential([et.Embedding(10, 2, name="rows")])(np.array([1.0, 1.7]))


class Around(keras.Model):
    def __init__(self, inner: keras.Model) -> None:
        super().__init__()
        self.inner = inner

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.inner(ids)


class OwnSequential(keras.Sequential):
    pass


def _stack() -> list[keras.layers.Layer]:
    layer = et.Embedding(None, 3, name="rows", embeddings_initializer="zeros")
    return [keras.Input((), dtype="int64", name="item"), layer, keras.layers.Dense(1, kernel_initializer="ones")]


def _added() -> keras.Model:
    model = keras.Sequential()
    for layer in _stack():
        model.add(layer)
    return model


SEQUENTIAL: dict[str, Callable[[], keras.Model]] = {
    "a list": lambda: keras.Sequential(_stack()),
    "add": _added,
    "a subclass": lambda: OwnSequential(_stack()),
    "in one": lambda: keras.Sequential([keras.Sequential(_stack())]),
    "in a subclass of Model": lambda: Around(keras.Sequential(_stack())),
}
OF_ARRAYS: dict[str, Callable[[keras.Model, Array], object]] = {
    "a call": lambda model, ids: model(ids),
    "predict of tf.data": lambda model, ids: model.predict(tf.data.Dataset.from_tensors(ids), verbose=0),
    "evaluate": lambda model, ids: model.evaluate(ids, Y, verbose=0),
    "model.fit of tf.data": lambda model, ids: model.fit(tf.data.Dataset.from_tensors((ids, Y)), verbose=0),
    "et.fit": lambda model, ids: et.fit(model, ids, Y, verbose=False),
}


@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_a_sequential_model_looks_at_its_integer_input_as_others_do(kind: str) -> None:
    model = SEQUENTIAL[kind]()
    model.compile("sgd", "mse")
    for face in OF_ARRAYS.values():
        with pytest.raises(BadIds, match=r"input 'item'.*1\.7|'rows': id 1\.7"):
            face(model, np.array([1.0, 2.0, 1.7, 3.0]))


@pytest.mark.parametrize("kind", ["a list", "add", "a subclass"])
def test_a_sequential_model_trains_the_row_of_the_very_id(kind: str) -> None:
    model = SEQUENTIAL[kind]()
    model.compile("sgd", "mse")
    model.fit(np.full(4, float(BIG)), Y, verbose=0)
    (layer,) = (layer for layer in model._flatten_layers() if isinstance(layer, et.Embedding))
    assert [bool(layer.read_rows(number).any()) for number in (BIG - 1, BIG)] == [False, True]


def test_a_sequential_model_within_another_has_its_own_input() -> None:
    inner, outer = keras.Sequential(_stack()), keras.Input((), name="outer")
    keras.Model(outer, inner(outer))
    with pytest.raises(BadIds, match=r"input 'item': record 1: 1.7 is no integer"):
        inner(np.array([1.0, 1.7]))


def test_a_sequential_model_reads_a_file_as_its_input_wants_it(tmp_path: Path) -> None:
    file = tmp_path / "ids.csv"
    for dtype, text, wanted in (("int64", f"{BIG}.0", BIG), ("string", "007", b"007")):
        file.write_text(f"item\n{text}\n")
        model = keras.Sequential([keras.Input((), dtype=dtype, name="item"), et.Embedding(None, 3)])
        reader = for_model(et.CsvReader(str(file)), model)
        read: Any = as_tensors(reader.take(np.arange(1)), model=model)[0]
        assert read["item"].numpy().tolist() == [wanted]


def test_an_offloaded_layer_refuses_what_keras_would_cut() -> None:
    column = np.array([1.0, 2.0, 1.7, 3.0])
    item = keras.Input((), name="item")
    model = keras.Model({"item": item}, keras.layers.Dense(1)(keras.layers.Embedding(10, 2, name="rows")(item)))
    model.compile("sgd", "mse")
    with pytest.raises(BadIds, match=r"'rows': id .* of record 2"):
        et.fit(model, {"item": column}, Y, offload_embeddings_above=1, shuffle=False, verbose=False)


def test_features_of_a_distributed_embedding() -> None:
    table = et.TableConfig("rows", 100, 2, combiner="sum")
    layer = et.DistributedEmbedding(
        {name: et.FeatureConfig(name, table, (4, 2), (4, 2)) for name in ("dense", "ragged", "sparse")}
    )
    ids = np.array([[1.0, 2.0], [3.0, 99.0]])
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0, 99.0]], dtype=tf.float64)
    found = layer({"dense": ids, "ragged": ragged, "sparse": tf.sparse.from_dense(ids)})
    for name in ("ragged", "sparse"):
        np.testing.assert_array_equal(found[name], found["dense"])
    others = {"ragged": ragged, "sparse": tf.sparse.from_dense(ids)}
    listed = layer(layer.preprocess({"dense": ids.tolist(), **others}))
    np.testing.assert_array_equal(listed["dense"], found["dense"])
    with pytest.raises(IdOutOfRange, match="id 16777217 of record 1 "):
        layer(layer.preprocess({"dense": [[1.0, 2.0], [3.0, float(BIG)]], **others}))
    bad = {"dense": ids, "ragged": ragged, "sparse": tf.sparse.from_dense(ids)}
    for name, value in {
        "dense": np.array([[1.0, 2.0], [3.5, 4.0]]),
        "ragged": tf.ragged.constant([[1.0], [np.nan, 2.0]], dtype=tf.float64),
        "sparse": tf.sparse.from_dense(np.array([[0.0, 0.0], [0.0, 2.5]])),
    }.items():
        with pytest.raises(BadIds, match=r"'rows': id .* of record 1 "):
            layer({**bad, name: value})


@pytest.mark.parametrize("size", [None, 100])
def test_a_layer_and_its_rows_take_ids_of_any_rank_and_kind_alike(size: int | None) -> None:
    layer = et.Embedding(size, 3, name="rows")
    store = et.open_store("memory")
    table = store.table(layer.table_spec())
    layer.attach(store)
    plain = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    kinds = ["int8", "uint8", "int32", "uint32", "int64", "uint64", ">i8", "float32", "float64", "float16"]
    given: list[Any] = [plain.astype(kind) for kind in kinds]
    given += [plain[:, 0, 0], plain[0], plain[0, 0, 0], plain.tolist(), 3, [1.0, 2.0], [], np.zeros((0, 2))]
    given += [plain[::-1, ::2], np.asfortranarray(plain), plain.astype(object)]
    for ids in given:
        wanted = layer.read_rows(np.asarray(ids).astype(np.int64))
        assert wanted.shape == (*np.shape(ids), 3)
        for found in (layer(ids), layer.read_rows(ids), table.lookup(ids)):
            np.testing.assert_array_equal(found, wanted)
    bad: list[Any] = [True, [True], np.array([True]), [1, None], [1.5], [np.nan], np.array([2**63], np.uint64),
                [[1], [2, 3]], np.ma.masked_array([1, 2], [False, True]), [2.0**60]]  # fmt: skip
    for ids in bad:
        for face in (layer, layer.read_rows, table.lookup):
            with pytest.raises(BadIds):
                face(ids)


ODD = {
    "complex": np.array([5 + 7j, 1j]),
    "extended": np.array([2**53 + 1, 2], np.longdouble),
    "text": np.array(["1", "2"]),
    "a null": np.array([1, None], object),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_number_is_refused_by_record_and_value(kind: str) -> None:
    ids = keras.Input((), dtype="int64", name="item")
    model = keras.Model(ids, et.Embedding(10, 2)(ids))
    for call in (lambda: model.predict(ODD[kind], verbose=0), lambda: model(ODD[kind])):
        with pytest.raises(
            BadIds, match=r"input 'item': record [01]: (?!np\.str_).* is no integer; the input takes int64"
        ):
            call()
    np.testing.assert_array_equal(model(np.array([1, 2], object)), model(np.array([1, 2])))


def test_objects_of_strings_are_read_and_a_null_is_named() -> None:
    texts = made(dtype="string")
    assert texts.predict({"item": pd.Series(["a", "b"])}, verbose=0).shape == (2, 1)
    for call in (
        lambda: texts.predict(np.array(["a", None], object), verbose=0),
        lambda: texts(pd.Series(["a", None])),
    ):
        with pytest.raises(BadIds, match=r"input 'item': record 1: (None|nan) is no string"):
            call()


def test_messages_say_what_to_write_instead(model: keras.Model) -> None:
    for numbers in (np.arange(4), np.ones(4)):
        with pytest.raises(BadInput, match=rf"'item' is given {numbers.dtype}, and takes strings; .*astype\(str\)"):
            made(dtype="string").fit({"item": numbers}, Y, verbose=0)
    ids = keras.Input((), dtype="int64")
    unnamed = keras.Model(ids, et.Embedding(10, 2)(ids))
    unnamed.compile("sgd", "mse")
    with pytest.raises(BadIds, match=r"^the data: an unnamed input: record 1: 1.5 is no integer"):
        et.fit(unnamed, np.array([1, 1.5]), np.ones((2, 2)), shuffle=False, verbose=False)
    for call in (model, lambda x: model.predict(x, verbose=0), lambda x: model.fit(x, Y, verbose=0)):
        with pytest.raises(BadIds, match=r"input 'item': record 0: 1.7 is no integer"):
            call(np.array([1.7, 2, 3, 4]))  # one array for a dict of one input
    with pytest.raises(ModelError, match=r"et\.step\(model\)"):
        model({"item": tf.range(4)}, training=True)
    with pytest.raises(Unsupported, match=r"keras\.initializers\.Constant\(matrix\)"):
        made(9, embeddings_initializer=lambda shape, dtype=None: np.ones(shape)).fit(np.arange(4), Y, verbose=0)
