"""Discovery finds every store-backed layer, however a model is put together."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import ModelError, SpecConflict, Unsupported
from elastable.master.model.discovery import StoreBackedLayer, create_tables, discover_tables, store_backed_layers
from tests.master.fakes import StoreLayer


class Subclassed(keras.Model):
    """Layers in attributes, lists, dicts and a model within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.one = StoreLayer(table="one")
        self.listed = [StoreLayer(table="listed"), keras.layers.Dense(1)]
        self.named = {"inner": StoreLayer(table="named")}
        self.within = keras.Sequential([StoreLayer(table="within")])

    def build(self, input_shape: tuple[int, int]) -> None:
        self.built = True

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return self.one(inputs) + self.listed[0](inputs) + self.named["inner"](inputs) + self.within(inputs)


def functional() -> keras.Model:
    inputs = keras.Input((1,), batch_size=2, dtype="int64")
    shared = StoreLayer(table="shared")
    inner = keras.Sequential([keras.Input((1,), batch_size=2, dtype="int64"), StoreLayer(table="inner")])
    return keras.Model(inputs, shared(inputs) + shared(inputs + 1) + inner(inputs))


@pytest.mark.parametrize(
    ("make", "tables"),
    [
        (functional, {"shared", "inner"}),
        (lambda: keras.Sequential([keras.Sequential([StoreLayer(table="deep")])]), {"deep"}),
        (Subclassed, {"one", "listed", "named", "within"}),
    ],
)
def test_every_layer_is_found_once(make: Callable[[], keras.Model], tables: set[str]) -> None:
    model = make()
    model.compile(keras.optimizers.SGD(0.125))
    model(np.zeros((2, 1), np.int64))
    layers = store_backed_layers(model)
    assert len(layers) == len(tables)
    assert all(isinstance(layer, StoreBackedLayer) for layer in layers)
    specs = discover_tables(model, 3)
    assert set(specs) == tables
    assert all((spec.seed, spec.name) == (3, name) for name, spec in specs.items())
    assert {(spec.optimizer.name, spec.optimizer.get("learning_rate", 0.0)) for spec in specs.values()} == {
        ("sgd", 0.125)
    }


def model_of(*layers: object) -> object:
    model = keras.Sequential(list(layers))
    model.compile("sgd")
    return model


@pytest.mark.parametrize("explicit", [None, "same"])
def test_layers_that_coincide_by_name_alone_are_refused(explicit: str | None) -> None:
    outer, inner = StoreLayer(name="same"), keras.Sequential([StoreLayer(name="same", table=explicit)])
    with pytest.raises(ModelError, match=r"both have a table 'same'.*different names.*table='same'") as refused:
        discover_tables(model_of(outer, inner), 0)
    assert not isinstance(refused.value, SpecConflict)


def test_layers_of_one_name_are_distinguished_by_their_towers() -> None:
    towers = [keras.Sequential([StoreLayer(name="rows")], name=name) for name in ("users", "items")]
    with pytest.raises(ModelError, match=r"layers '\S*rows' of 'users' and '\S*rows' of 'items' both have"):
        discover_tables(model_of(*towers), 0)


def test_one_table_with_two_specs_names_both_layers() -> None:
    with pytest.raises(SpecConflict, match=r"'first' and 'second' share the table 't'.*dim"):
        discover_tables(model_of(StoreLayer(2, "t", name="first"), StoreLayer(3, "t", name="second")), 0)


def test_a_model_without_such_layers_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"et\.Embedding.*--offload-embeddings-above"):
        discover_tables(model_of(keras.layers.Dense(2)), 0)


def test_constraints_become_part_of_the_tables_optimizer() -> None:
    specs = discover_tables(model_of(StoreLayer(table="t", constraint=keras.constraints.NonNeg())), 0)
    assert specs["t"].optimizer.name == "constrained"
    with pytest.raises(Unsupported, match=r"layer 'e'.*axis=1"):
        discover_tables(model_of(StoreLayer(name="e", constraint=keras.constraints.MaxNorm(1.0))), 0)


def test_tables_are_created_once() -> None:
    specs = discover_tables(model_of(StoreLayer(table="t"), StoreLayer(table="u")), 0)
    with MemoryStore() as store:
        assert create_tables(store, specs) == ("t", "u")
        assert create_tables(store, specs) == ()
        with pytest.raises(SpecConflict, match="seed"):
            create_tables(store, discover_tables(model_of(StoreLayer(table="t")), 1))
