"""Layers that say when ids are admitted and evicted."""

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec, SpecConflict
from elastable.master.keras.discovery import discover_tables
from tests.untyped import Keywords

ADMISSION, EVICTION = et.AdmissionSpec(2, 1 << 12), et.EvictionSpec(max_age=3, every=2)


def model_of(*layers: et.Embedding) -> keras.Model:
    ids = keras.Input((1,), dtype="int64", name="ids")
    rows = [keras.layers.Flatten()(layer(ids)) for layer in layers]
    joined = rows[0] if len(rows) == 1 else keras.layers.Concatenate()(rows)
    return keras.Model(ids, keras.layers.Dense(1)(joined))


def test_the_table_is_made_as_the_layer_says() -> None:
    model = model_of(et.Embedding(None, 4, admission=ADMISSION, eviction=EVICTION, table="t"))
    spec = discover_tables(model, 0, OptimizerSpec())["t"]
    assert (spec.admission, spec.eviction) == (ADMISSION, EVICTION)
    plain = discover_tables(model_of(et.Embedding(None, 4, table="t")), 0, OptimizerSpec())["t"]
    assert (plain.admission, plain.eviction) == (None, None)


def test_layers_that_share_a_table_want_the_same() -> None:
    model = model_of(et.Embedding(None, 4, eviction=EVICTION, table="t"), et.Embedding(None, 4, table="t"))
    with pytest.raises(SpecConflict, match="eviction"):
        discover_tables(model, 0, OptimizerSpec())


@pytest.mark.parametrize("admission", [None, ADMISSION])
@pytest.mark.parametrize("eviction", [None, EVICTION, et.EvictionSpec(ttl=3600)])
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
