"""`et.DistributedEmbedding` next to keras-rs' own layer: the same programs, nests, shapes and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadIds, BadInput, BadSpec, Unsupported
from elastable.embedding_store.tables.row_blocks import fresh_rows
from elastable.master.model.discovery import discover_tables
from elastable.worker.readers.batch.pytrees import Structure
from elastable.worker.user_model.export import export_keras

BATCH, DIM = 8, 4
Table, Feature = keras_rs.layers.TableConfig, keras_rs.layers.FeatureConfig
Config: TypeAlias = "et.FeatureConfig | keras_rs.layers.FeatureConfig"


def features(
    table: Callable[..., object] = Table,
    feature: Callable[..., Config] = Feature,
    optimizer: keras.optimizers.Optimizer | str = "adam",
    placement: str = "auto",
) -> dict[str, Structure[Config]]:
    """Dicts, lists and tuples of features of rank 1 and 2; "a" and "b" are shared; every combiner."""

    def made(name: str, combiner: str) -> object:
        initializer = keras.initializers.Constant(0.25)
        return table(
            name, 20, DIM, initializer=initializer, optimizer=optimizer, combiner=combiner, placement=placement
        )

    a, b, c = made("a", "mean"), made("b", "sum"), made("c", "sqrtn")
    one, many, out = (BATCH,), (BATCH, 3), (BATCH, DIM)
    return {
        "one": feature("one", a, one, out),
        "listed": [feature("two", a, many, out), feature("three", b, many, out)],
        "pair": (feature("four", c, many, out), feature("five", b, one, out)),
    }


def ids(kind: str, seed: int = 0) -> tf.Tensor:
    random = np.random.default_rng(seed)

    def many() -> object:
        if kind == "dense":
            return tf.constant(random.integers(0, 20, (BATCH, 3)))
        rows = [random.integers(0, 20, n) for n in (3, 0, 2, 1, 1, 0, 2, 1)]
        ragged = tf.ragged.constant([row.tolist() for row in rows], dtype=tf.int64)
        return ragged if kind == "ragged" else ragged.to_sparse()

    def one() -> object:
        return tf.constant(random.integers(0, 20, BATCH))

    return {"one": one(), "listed": [many(), many()], "pair": (many(), one())}


def weights_of(nest: tf.Tensor) -> dict[str, object]:
    random = np.random.default_rng(7)

    def like(part: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> object:
        def drawn(count: int) -> object:
            return tf.constant(random.uniform(0.1, 2.0, count), tf.float32)

        if isinstance(part, tf.RaggedTensor):
            return part.with_values(drawn(part.values.shape[0]))
        if isinstance(part, tf.SparseTensor):
            return tf.SparseTensor(part.indices, drawn(part.values.shape[0]), part.dense_shape)
        return tf.reshape(drawn(int(tf.size(part))), part.shape)

    return {"one": like(nest["one"]), "listed": [*map(like, nest["listed"])], "pair": (*map(like, nest["pair"]),)}


def filled(layer: keras.layers.Layer) -> dict[str, Array]:
    """Gives every table rows of its own; table -> rows."""
    store, random = et.MemoryStore(), np.random.default_rng(1)
    rows = {}
    for table in layer._tables:
        spec = table.table_spec()
        rows[spec.name] = random.normal(size=(20, DIM)).astype(np.float32)
        store.create_table(spec)
        store.put(spec.name, [fresh_rows(spec, np.arange(20), rows[spec.name])])
        table.attach(store)
    return rows


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_what_keras_rs_returns(kind: str, weighted: bool) -> None:
    ours = et.DistributedEmbedding(features())
    theirs = keras_rs.layers.DistributedEmbedding(features())
    nest = ids(kind)
    weights = weights_of(nest) if weighted else None
    theirs(nest, weights)
    rows = filled(ours)
    for layer in set(theirs._default_device_embedding_layers.values()):
        layer.set_weights([rows[layer.name]])
    wanted = theirs(nest, weights)
    for got in (ours(nest, weights), ours(ours.preprocess(nest, weights))):
        keras.tree.assert_same_structure(wanted, got)
        for mine, other in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-7)
    for name, table in ours.get_embedding_tables().items():
        np.testing.assert_array_equal(table, rows[name])


def test_symbolic_outputs_have_the_nest_and_the_shapes() -> None:
    def given(kind: dict[str, bool]) -> object:
        def many() -> object:
            return keras.Input((None,), dtype="int64", **kind)

        return {
            "one": keras.Input((), dtype="int64"),
            "listed": [many(), many()],
            "pair": (many(), keras.Input((), dtype="int64")),
        }

    for kind in ({}, {"ragged": True}, {"sparse": True}):
        outputs = et.DistributedEmbedding(features())(given(kind))
        keras.tree.assert_same_structure(ids("dense"), outputs)
        assert all(output.shape == (None, DIM) and not output.ragged for output in keras.tree.flatten(outputs))


def test_the_defaults_are_those_of_keras_rs() -> None:
    ours, theirs = et.TableConfig("t", 100, 16), Table("t", 100, 16)
    assert (ours.combiner, ours.optimizer, ours.placement) == (theirs.combiner, theirs.optimizer, theirs.placement)
    assert keras.initializers.serialize(ours.initializer) == keras.initializers.serialize(theirs.initializer)


def by_name(nest: object) -> dict[str, Config]:
    """A flat dict, as in keras-rs' examples: its own layer warns of lists in subclassed models."""
    return dict(zip("vwxyz", keras.tree.flatten(nest), strict=True))


class Ranking(keras.Model):
    """keras-rs' DLRM example: dense features, embedded features, dot interactions, a head."""

    def __init__(self, embedding: keras.layers.Layer) -> None:
        super().__init__()
        self.embedding = embedding
        self.interaction = keras_rs.layers.DotInteraction()
        self.bottom = dense(DIM, 1)
        self.top = dense(1, 2)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        number = self.bottom(inputs["numbers"])
        embedded = self.embedding(inputs["ids"], training=training)
        return self.top(self.interaction([number, *keras.tree.flatten(embedded)]))


def dense(units: int, seed: int) -> keras.layers.Layer:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed))


def clicks(records: int = BATCH * 4) -> tuple[dict[str, object], Array]:
    random = np.random.default_rng(3)
    one, many = ((records,), (records, 3))
    nest = {
        "one": random.integers(0, 20, one),
        "listed": [random.integers(0, 20, many), random.integers(0, 20, many)],
        "pair": (random.integers(0, 20, many), random.integers(0, 20, one)),
    }
    return {
        "numbers": random.normal(size=(records, 2)).astype(np.float32),
        "ids": dict(zip("vwxyz", keras.tree.flatten(nest), strict=True)),
    }, random.random(records)


def trained(
    make: Callable[[keras.layers.Layer], keras.Model],
    embedding: keras.layers.Layer,
    records: tuple[Mapping[str, object], Array],
    optimizer: keras.optimizers.Optimizer,
    loss: object = "mse",
) -> dict[str, Array]:
    """The model after two epochs; returns the tables' rows and the dense weights."""
    model = make(embedding)
    model.compile(optimizer, loss)
    if isinstance(embedding, et.DistributedEmbedding):
        et.fit(model, records, epochs=2, batch_size=BATCH, shuffle=False, verbose=False)
    else:
        model.fit(*records, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
    heads = [layer.get_weights() for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)]
    weights = np.concatenate([part.ravel() for head in heads for part in head])
    return {**embedding.get_embedding_tables(), "dense": weights}


def same_as_keras_rs(
    make: Callable[[keras.layers.Layer], keras.Model],
    ours: Structure[Config],
    theirs: Structure[Config],
    records: tuple[Mapping[str, object], Array],
    rate: float = 0.02,
    loss: object = "mse",
) -> None:
    got = trained(make, et.DistributedEmbedding(ours), records, keras.optimizers.SGD(rate), loss)
    expected = trained(make, keras_rs.layers.DistributedEmbedding(theirs), records, keras.optimizers.SGD(rate), loss)
    for name, wanted in expected.items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whose", [(et.TableConfig, et.FeatureConfig), (Table, Feature)], ids=["et", "keras-rs"])
def test_a_dlrm_trains_as_with_keras_rs(whose: object) -> None:
    # On a CPU keras-rs trains every table with the model's optimizer; here its own is the same.
    ours = by_name(features(*whose, optimizer=keras.optimizers.SGD(0.02)))  # type: ignore[misc]
    same_as_keras_rs(Ranking, ours, by_name(features()), clicks())


def test_tables_on_the_default_device_are_trained_by_the_models_optimizer() -> None:
    ours, theirs = (by_name(features(placement="default_device", optimizer="adagrad")) for _ in range(2))
    same_as_keras_rs(Ranking, ours, theirs, clicks())


def test_tables_have_the_optimizers_of_their_configs() -> None:
    configs = features(optimizer=keras.optimizers.Adagrad(0.25))
    pair = configs["pair"]
    assert isinstance(pair, tuple)
    pair[0].table.optimizer = "sgd"
    model = Ranking(et.DistributedEmbedding(configs))
    model.compile(keras.optimizers.Lamb(), "mse")  # which no table could have
    model({"numbers": np.zeros((BATCH, 2), np.float32), "ids": ids("dense")})
    specs = {name: spec.optimizer for name, spec in discover_tables(model, 0).items()}
    assert {name: spec.name for name, spec in specs.items()} == {"a": "adagrad", "b": "adagrad", "c": "sgd"}
    assert specs["a"].get("learning_rate", 0.0) == 0.25


class Retrieval(keras.Model):
    """keras-rs' sequential retrieval example: a sequence of items is the query, the next item the candidate."""

    def __init__(self, embedding: keras.layers.Layer) -> None:
        super().__init__()
        self.embedding = embedding
        self.query = dense(DIM, 1)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        embedded = self.embedding({"history": inputs["history"], "candidate": inputs["candidate"]})
        return {"query": self.query(embedded["history"]), "candidate": embedded["candidate"]}

    def compute_loss(
        self, x: object, y: object, y_pred: dict[str, tf.Tensor], sample_weight: object = None, training: bool = True
    ) -> tf.Tensor:
        scores = keras.ops.matmul(y_pred["query"], keras.ops.transpose(y_pred["candidate"]))
        labels = keras.ops.eye(keras.ops.shape(scores)[0])
        return keras.ops.mean(keras.losses.categorical_crossentropy(labels, scores, from_logits=True))


def test_sequential_retrieval_trains_as_with_keras_rs() -> None:
    def configs(optimizer: keras.optimizers.Optimizer | str) -> dict[str, Config]:
        random = keras.initializers.Constant(np.float32(0.1))
        items = Table("items", 20, DIM, initializer=random, optimizer=optimizer)
        return {
            "history": Feature("history", items, (BATCH, 5), (BATCH, DIM)),
            "candidate": Feature("candidate", items, (BATCH,), (BATCH, DIM)),
        }

    draw = np.random.default_rng(5)
    x = {"history": draw.integers(0, 20, (BATCH * 4, 5)), "candidate": draw.integers(0, 20, BATCH * 4)}
    records = (x, np.zeros(BATCH * 4, np.float32))
    same_as_keras_rs(Retrieval, configs(keras.optimizers.SGD(0.5)), configs("sgd"), records, 0.5, None)


class TestSequences:
    def layer(self, length: int = 3) -> keras.layers.Layer:
        table = et.TableConfig("items", 20, DIM, optimizer="sgd")
        return et.DistributedEmbedding(et.FeatureConfig("history", table, max_sequence_length=length))

    @pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
    def test_rows_come_in_order_cut_or_padded_with_zeros(self, kind: str) -> None:
        layer, lists = self.layer(), [[1, 2, 3, 4, 5], [], [7]]
        if kind == "dense":
            lists = [[1, 2], [3, 4], [7, 0]]
        given = tf.constant(lists) if kind == "dense" else tf.ragged.constant(lists, dtype=tf.int64)
        if kind == "sparse":
            given = given.to_sparse()
        rows = filled(layer)["items"]
        got = np.asarray(layer(given))
        assert got.shape == (3, 3, DIM)
        wanted = np.zeros((3, 3, DIM), np.float32)
        for record, found in enumerate(lists):
            for place, item in enumerate(found[:3]):
                wanted[record, place] = rows[item]
        np.testing.assert_array_equal(got, wanted)

    def test_they_train(self) -> None:
        inputs = keras.Input((4,), dtype="int64")
        layer = self.layer()
        model = keras.Model(inputs, dense(1, 2)(keras.layers.GRU(3)(layer(inputs))))
        model.compile("sgd", "mse")
        given = np.array([[1, 2, 3, 4], [5, 5, 5, 9], [6, 7, 1, 9]])
        before = layer.get_embedding_tables()["items"].numpy()
        et.fit(model, (given, np.ones(3, np.float32)), verbose=False)
        moved = np.flatnonzero((layer.get_embedding_tables()["items"].numpy() != before).any(axis=1))
        assert moved.tolist() == [1, 2, 3, 5, 6, 7]

    def test_weights_and_other_ranks_are_refused(self) -> None:
        layer = self.layer()
        with pytest.raises(BadIds, match=r"'items'.*max_sequence_length=3.*rank 2 and no weights, got weights"):
            layer(np.ones((2, 3), np.int64), np.ones((2, 3), np.float32))
        with pytest.raises(BadIds, match="ids of rank 1"):
            layer(np.ones(2, np.int64))


class TestSaved:
    def test_a_model_with_it_loads_and_predicts_the_same(self, tmp_path: Path) -> None:
        embedding = et.DistributedEmbedding(features(optimizer=keras.optimizers.Adagrad(0.1)))
        inputs = {
            "one": keras.Input((), dtype="int64", name="one"),
            "listed": [keras.Input((3,), dtype="int64", name=name) for name in ("l0", "l1")],
            "pair": (keras.Input((3,), dtype="int64", name="p0"), keras.Input((), dtype="int64", name="p1")),
        }
        model = keras.Model(inputs, dense(1, 2)(keras.layers.Concatenate()(keras.tree.flatten(embedding(inputs)))))
        model.compile("sgd", "mse")
        x = keras.tree.map_structure(np.asarray, ids("dense"))
        et.fit(model, (x, np.ones(BATCH, np.float32)), batch_size=BATCH, verbose=False)
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
        layer = next(layer for layer in again.layers if isinstance(layer, et.DistributedEmbedding))
        optimizer = layer._tables[0].optimizer
        assert optimizer is not None
        assert float(optimizer.learning_rate) == pytest.approx(0.1)
        with pytest.raises(Unsupported, match=r"distributed_embedding.*plain Keras.*et\.Embedding"):
            export_keras(model, embedding._tables[0].source, tmp_path / "plain.keras")  # type: ignore[arg-type]

    def test_shared_tables_stay_shared(self) -> None:
        layer = et.DistributedEmbedding(features())
        again = et.DistributedEmbedding.from_config(layer.get_config())
        assert again.get_config() == layer.get_config()
        assert [table.name for table in again._tables] == ["a", "b", "c"]


class TestRefused:
    @pytest.mark.parametrize(
        ("configs", "message"),
        [
            ({}, "there are no features"),
            ({"f": Table("t", 9, 2)}, "feature 'f': TableConfig.*is no description of a feature"),
            ({"f": Feature("f", Table("t", 9, 2, combiner="max"), (8,), (8, 2))}, "'t': combiner 'max'.*sqrtn"),
            ({"f": Feature("f", Table("t", 9, 2, placement="moon"), (8,), (8, 2))}, "'t': placement 'moon'"),
            (
                [Feature("f", Table("t", 9, 2), (8,), (8, 2)), Feature("g", Table("t", 9, 2), (8,), (8, 2))],
                "same TableC",
            ),
            ({"f": et.FeatureConfig("f", et.TableConfig("t", 9, 2), max_sequence_length=-1)}, "max_sequence_length"),
        ],
    )
    def test_descriptions(self, configs: Structure[et.FeatureConfig], message: str) -> None:
        with pytest.raises(BadSpec, match=message):
            et.DistributedEmbedding(configs)

    @pytest.mark.parametrize(
        ("nest", "message"),
        [
            ({"one": 1}, r"inputs: feature_configs have the keys \['listed', 'one', 'pair'\], got the keys \['one'\]"),
            ({**ids("dense"), "listed": [1]}, r"inputs\['listed'\]: .* a list of 2 features here, got 1"),
            ([1], "got list"),
        ],
    )
    def test_another_nest_names_the_place(self, nest: dict[str, int] | list[int] | tf.Tensor, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            et.DistributedEmbedding(features()).preprocess(nest)

    def test_statistics_of_jax(self) -> None:
        with pytest.raises(Unsupported, match="update_stats=True"):
            et.DistributedEmbedding(features(), update_stats=True)
