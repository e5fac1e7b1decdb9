"""Ids of strings and of integers, and layers that say when ids are admitted and evicted."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.spec import spec_from_json, spec_to_json
from elastable.embedding_store.errors import BadIds, BadInput, BadSpec, SpecConflict
from elastable.master.model.discovery import discover_tables
from tests.untyped import Keywords

KNOWN = {
    # The examples of BigQuery's page on FARM_FINGERPRINT, and FarmHash's constant for no bytes.
    "1footrue": -1541654101129638711,
    "2applefalse": 2794438866806483259,
    "3true": -4880158226897771312,
    "": -7286425919675154353,
}


USERS = ["alice", "bob", "", "42", "üñí", "a" * 100]


def test_known_values() -> None:
    assert et.hash_ids(list(KNOWN)).tolist() == list(KNOWN.values())


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_the_very_function_of_tensorflow(texts: list[bytes]) -> None:
    graph = tf.bitcast(tf.fingerprint(tf.constant(texts, tf.string)), tf.int64)
    np.testing.assert_array_equal(et.hash_ids(np.array(texts, object)), graph)


def test_every_length() -> None:
    texts = [bytes(range(length)) for length in range(150)]
    wanted = tf.bitcast(tf.fingerprint(tf.constant(texts)), tf.int64)
    np.testing.assert_array_equal([et.hash_ids(text) for text in texts], wanted)


def test_shapes_and_refusals() -> None:
    ids = et.hash_ids([["alice", b"bob"], ["bob", "alice"]])  # type: ignore[arg-type]
    assert (ids.shape, ids.dtype) == ((2, 2), np.int64)
    assert (ids == ids[::-1, ::-1]).all()
    for wrong in (7, ["a", 7], np.array([1.0])):
        with pytest.raises(BadIds, match="hash_ids takes strings"):
            et.hash_ids(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("functional", [True, False])
def test_a_layer_reads_the_rows_of_the_hashes(functional: bool) -> None:
    texts, ids = np.array(USERS, object), et.hash_ids(USERS)
    strings, numbers = et.Embedding(None, 3, table="users"), et.Embedding(None, 3, table="users")
    if functional:
        inputs = keras.Input((), dtype="string")
        model = keras.Model(inputs, strings(inputs))
        found = model.predict(tf.constant(texts), verbose=0)
    else:
        found = tf.function(strings)(tf.constant(texts))
    np.testing.assert_array_equal(found, numbers(ids))


def test_ragged_sparse_and_masked_strings() -> None:
    layer, plain = et.Embedding(None, 2, combiner="sum", table="t"), et.Embedding(None, 2, table="t")
    rows = dict(zip(["a", "b", ""], np.asarray(plain(et.hash_ids(["a", "b", ""]))), strict=True))
    ragged = layer(tf.ragged.constant([["a", "b"], [], [""]]))
    np.testing.assert_allclose(ragged, [rows["a"] + rows["b"], [0, 0], rows[""]], rtol=1e-6)
    # The id of "" is below 0, where a sparse integer of a fixed vocabulary is left out.
    sparse = tf.SparseTensor([[0, 0], [1, 1]], [b"", b"b"], [2, 2])
    np.testing.assert_allclose(layer(sparse), [rows[""], rows["b"]], rtol=1e-6)
    hashed = tf.SparseTensor([[0, 0], [1, 1]], et.hash_ids(["", "b"]), [2, 2])
    again = et.Embedding(None, 2, combiner="sum", table="t")
    np.testing.assert_allclose(again(hashed), [rows[""], rows["b"]], rtol=1e-6)
    masking = et.Embedding(None, 2, combiner="sum", mask_zero=True, table="t")
    np.testing.assert_allclose(masking(tf.constant([["a", ""]])), [rows["a"]], rtol=1e-6)
    np.testing.assert_allclose(masking(sparse), [[0, 0], rows["b"]], rtol=1e-6)
    mask = et.Embedding(None, 2, mask_zero=True).compute_mask(tf.constant([["a", ""]]))
    assert mask is not None
    assert mask.numpy().tolist() == [[True, False]]


def job(strings: bool = True) -> keras.Model:
    inputs = keras.Input((), dtype="string" if strings else "int64")
    rows = et.Embedding(None, 4, name="users")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(rows))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_training_on_strings_is_training_on_their_hashes() -> None:
    texts = np.array(["alice", "bob", "42", "alice"] * 8, object)
    y = np.arange(32, dtype=np.float32) / 32
    trained = []
    for x in (texts, et.hash_ids(texts)):
        model = job(strings=x is texts)
        store = et.MemoryStore()
        et.fit(model, (x, y), epochs=2, batch_size=8, store=store, verbose=False)
        trained.append(store.lookup({"users": et.hash_ids(["alice", "bob", "42", "new"])})["users"])
        assert store.specs()["users"].ids == ("farmhash64" if x is texts else "int64")
    np.testing.assert_array_equal(*trained)  # type: ignore[arg-type]


def test_a_table_of_strings_is_not_one_of_integers() -> None:
    store, y = et.MemoryStore(), np.zeros(4, np.float32)
    et.fit(job(), (np.array(USERS[:4], object), y), store=store, verbose=False)
    with pytest.raises(BadInput, match="holds 4 rows of table 'users' already"):
        et.fit(job(strings=False), (np.arange(4), y), store=store, verbose=False)
    empty = et.MemoryStore()
    empty.create_table(store.specs()["users"])
    with pytest.raises(SpecConflict, match=r"'users'.* ids"):
        et.fit(job(strings=False), (np.arange(4), y), store=empty, verbose=False)
    layer = et.Embedding(None, 2, name="both")
    layer(tf.constant(["a"]))
    with pytest.raises(BadIds, match="'both': called on strings and on integers"):
        layer(tf.constant([1]))


def test_what_a_spec_says_of_its_ids_survives() -> None:
    spec = et.TableSpec("users", 2, ids="farmhash64")
    assert spec_from_json(spec_to_json(spec)) == spec
    assert "ids" not in spec_to_json(et.TableSpec("users", 2))


def test_strings_for_a_fixed_vocabulary_are_refused() -> None:
    message = r"'items': called on strings, and input_dim=10 .*keras\.layers\.StringLookup or keras\.layers\.Hashing"
    with pytest.raises(BadIds, match=message):
        et.Embedding(10, 2, name="items")(keras.Input((), dtype="string"))
    with pytest.raises(BadIds, match=message):
        et.Embedding(10, 2, name="items")(tf.constant(["a"]))


# Integers


def test_unsigned_ids_that_are_too_large_are_refused() -> None:
    layer = et.Embedding(None, 2, name="u")
    small = tf.constant([1, 2**63 - 1], tf.uint64)
    np.testing.assert_array_equal(layer(small), et.Embedding(None, 2, table="u")(tf.constant([1, 2**63 - 1])))
    large = tf.constant([1, 2**63 + 5], tf.uint64)
    with pytest.raises(BadIds, match=r"'u': id 9223372036854775813 of record 1 .* above 2\*\*63 - 1.*int64"):
        layer(large)
    traced = tf.function(layer, input_signature=[tf.TensorSpec([None], tf.uint64)])
    np.testing.assert_array_equal(traced(small), layer(small))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"u.*: id 9223372036854775813 of record 1 .* above"):
        traced(large)


class Large(et.Reader):
    """Ids of which a later one is too large, as tensors: no reader of ours has seen them."""

    def __len__(self) -> int:
        return 8

    def take(self, indices: Array) -> tf.Tensor:
        ids = tf.constant(indices.astype(np.uint64) * np.uint64(2**61))
        return ids, tf.zeros(len(indices))


def test_unsigned_ids_that_are_too_large_end_a_job() -> None:
    inputs = keras.Input((), dtype="uint64")
    model = keras.Model(inputs, keras.layers.Dense(1)(et.Embedding(None, 2, name="u")(inputs)))
    model.compile("sgd", "mse")
    with pytest.raises(BadIds, match=r"^x: embedding layer 'u': id \d+ of record \d+ is above 2\*\*63 - 1"):
        et.fit(model, Large(), batch_size=2, shuffle=False, verbose=False)


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[1.0], [2.0, 3.0]]), "they differ in where records"),
        (
            tf.ragged.constant([[1, 2], [3]]),
            tf.constant([[1.0, 2.0], [3.0, 0.0]]),
            "ids are ragged and their weights d",
        ),
        (tf.constant([[1, 2]]), tf.constant([[1.0], [2.0]]), r"ids are \(1, 2\), weights \(2, 1\)"),
        (tf.sparse.from_dense([[1, 0]]), tf.sparse.from_dense([[0.0, 1.0]]), "they differ in where records"),
    ],
)
def test_weights_of_other_ids_are_refused(ids: object, weights: object, message: str) -> None:
    with pytest.raises(BadIds, match=f"'w': .*{message}"):
        et.Embedding(None, 2, combiner="sum", name="w")(ids, weights)


def test_booleans_are_no_ids() -> None:
    with pytest.raises(BadIds, match="'f': ids must be integers or strings, got bool"):
        et.Embedding(None, 2, name="f")(tf.constant([True]))


IDS = np.array([[2**24 + 1, 2], [2**53 + 1, 2**62 + 1]], np.int64)


def table() -> keras.layers.Layer:
    return et.Embedding(None, 3, name="rows")


def expected() -> Array:
    return table().read_rows(IDS.reshape(-1)).reshape(2, 2, 3)


MODELS = {
    "nested": lambda: [keras.Input((2,), dtype="int64"), keras.Sequential([table()])],
    "nested twice": lambda: [keras.Input((2,), dtype="int64"), keras.Sequential([keras.Sequential([table()])])],
    "not built": lambda: [table()],
    "not built, nested": lambda: [keras.Sequential([table()])],
    "an input of no dtype": lambda: [keras.Input((2,)), table()],
}


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_exact(name: str, tmp_path: Path) -> None:
    model = keras.Sequential(MODELS[name]())
    np.testing.assert_array_equal(model(IDS), expected())
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected())
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras").predict(IDS, verbose=0), expected())


def test_an_input_that_others_share_stays_what_it_was_declared() -> None:
    numbers = keras.Input((2,))
    model = keras.Model(numbers, [keras.layers.Dense(1)(numbers), table()(numbers)])
    assert model.input.dtype == "float32"
    np.testing.assert_array_equal(model(np.ones((1, 2), np.float32))[1], table().read_rows([[1, 1]]))
    with pytest.raises(BadIds, match=r"'rows': id 0.5 of record 0 .*no integer"):
        model(np.full((1, 2), 0.5, np.float32))


def test_an_embedding_behind_another_layer_is_left_alone() -> None:
    with pytest.raises(BadIds, match="no integer"):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), table()])(np.ones((1, 2), np.float32))


ADMISSION, EVICTION = et.AdmissionSpec(2, 1 << 12), et.EvictionSpec(max_age=3, every=2)


def model_of(*layers: et.Embedding) -> keras.Model:
    ids = keras.Input((1,), dtype="int64", name="ids")
    rows = [keras.layers.Flatten()(layer(ids)) for layer in layers]
    joined = rows[0] if len(rows) == 1 else keras.layers.Concatenate()(rows)
    model = keras.Model(ids, keras.layers.Dense(1)(joined))
    model.compile("sgd")
    return model


def test_layers_that_share_a_table_want_the_same() -> None:
    model = model_of(et.Embedding(None, 4, eviction=EVICTION, table="t"), et.Embedding(None, 4, table="t"))
    with pytest.raises(SpecConflict, match="eviction"):
        discover_tables(model, 0)


@pytest.mark.parametrize(("admission", "eviction"), [(None, EVICTION), (ADMISSION, et.EvictionSpec(ttl=3600))])
def test_config_goes_round(admission: et.AdmissionSpec | None, eviction: et.EvictionSpec | None) -> None:
    layer = et.Embedding(None, 4, admission=admission, eviction=eviction)
    again = et.Embedding.from_config(layer.get_config())
    assert (again.admission, again.eviction) == (admission, eviction)
    model = keras.models.model_from_json(model_of(layer).to_json())
    found = next(layer for layer in model.layers if isinstance(layer, et.Embedding))
    assert found.table_spec() == layer.table_spec()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"admission": ADMISSION, "input_dim": 10}, "'e': admission is for tables of any ids.*10"),
        ({"eviction": EVICTION, "input_dim": 10}, "'e': eviction is for tables of any ids.*10"),
        ({"admission": 3}, "'e': admission must be None or an et.AdmissionSpec, got 3"),
        ({"eviction": ADMISSION}, "'e': eviction must be None or an et.EvictionSpec"),
        ({"eviction": {"max_size": 4}}, "'e': eviction.*max_size"),
        ({"admission": {"sightings": 0}}, "sightings must lie from 1 to 255"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: Keywords, message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        et.Embedding(**{"input_dim": None, "output_dim": 4, **arguments}, name="e")


@pytest.mark.parametrize("place", ["memory", pytest.param("redis", marks=pytest.mark.process)])
def test_a_model_trains_with_them(place: str, request: pytest.FixtureRequest) -> None:
    """Ids that come once are never admitted, those that stay away are evicted, and what reads them goes on."""
    model = model_of(et.Embedding(None, 4, admission=ADMISSION, eviction=EVICTION, table="t"))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    often, once, early = np.tile([1, 2], 32), np.arange(100, 132), np.tile([7, 8], 16)
    # Eight versions of sixteen records: the early ids come in the first two of them alone.
    ids = np.concatenate([early, often, once]).reshape(-1, 1).astype(np.int64)
    with et.open_store(place if place == "memory" else request.getfixturevalue("redis_url")) as store:
        et.fit(model, (ids, np.ones(len(ids))), batch_size=16, shuffle=False, store=store, verbose=False)
        kept = store.table_statistics("t")
        found = sorted(one for block in store.scan("t") for one in block.ids.tolist())
        assert store.version() == 8
    assert found == [1, 2]
    assert kept.evicted == 2  # 7 and 8, not seen after version 2
    assert kept.refused == 2 + 2 + 32
