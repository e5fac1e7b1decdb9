"""Table specs: what is refused, and that JSON and messages lose nothing."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastable.embedding_store import (
    SCALED_INITIALIZERS,
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ShardOrigin,
    TableSpec,
)
from elastable.embedding_store.contract.spec import spec_from_json, spec_to_json, variance_scaling
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.store_messages import spec_from_message, spec_to_message


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 2.0**31, "1h"])
def test_a_time_to_live_that_cannot_be_is_refused(ttl: float) -> None:
    with pytest.raises(BadSpec, match=r"eviction: ttl must lie from 0.001 to 2\*\*31 seconds"):
        EvictionSpec(ttl=ttl)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "t"}', '{"optimizer": 3}'])
def test_what_is_no_spec(text: str) -> None:
    with pytest.raises(BadSpec, match="no table spec"):
        spec_from_json(text)


@pytest.mark.parametrize("field", ["name", "keras_config"])
def test_a_list_in_place_of_a_value_is_no_spec(field: str) -> None:
    fields = json.loads(spec_to_json(TableSpec("t", 8)))
    fields["optimizer"][field] = [fields["optimizer"][field]]
    with pytest.raises(BadSpec, match="no table spec"):
        spec_from_json(json.dumps(fields))


@pytest.mark.parametrize(("dim", "size"), [(True, None), (4, True)])
def test_a_boolean_is_no_number(dim: int, size: int | None) -> None:
    with pytest.raises(BadSpec, match=r"table 't': (dim|vocabulary_size) must be .*integer.*, got True"):
        TableSpec("t", dim, size)


# Glorot and Bengio 2010; He et al. 2015; LeCun et al. 1998; a normal cut at two sigma is narrower by 0.8796.
@pytest.mark.parametrize(("kind", "variance"), [("glorot", 2 / (1000 + 24)), ("he", 2 / 1000), ("lecun", 1 / 1000)])
def test_a_table_says_what_the_kind_means_for_its_shape(kind: str, variance: float) -> None:
    uniform = TableSpec("t", 24, 1000, initializer=InitializerSpec(f"{kind}_uniform")).initializer
    assert uniform.kind == "uniform"
    assert (uniform.a, uniform.b) == pytest.approx((-math.sqrt(3 * variance), math.sqrt(3 * variance)))
    normal = TableSpec("t", 24, 1000, initializer=InitializerSpec(f"{kind}_normal")).initializer
    assert (normal.kind, normal.a) == ("truncated_normal", 0.0)
    assert normal.b * 0.87962566103423978 == pytest.approx(math.sqrt(variance))


@pytest.mark.parametrize("kind", SCALED_INITIALIZERS)
def test_a_table_without_vocabulary_says_what_to_give(kind: str) -> None:
    with pytest.raises(BadSpec, match=rf"'t': initializer {kind} .*InitializerSpec\('{kind}', a=ROWS\)"):
        TableSpec("t", 24, initializer=InitializerSpec(kind))
    by_rows = TableSpec("t", 24, initializer=InitializerSpec(kind, 1000))
    assert by_rows.initializer == TableSpec("t", 24, 1000, initializer=InitializerSpec(kind)).initializer
    with pytest.raises(BadSpec, match="a is a number of rows"):
        InitializerSpec(kind, 0.5)
    with pytest.raises(BadSpec, match="b is not used"):
        InitializerSpec(kind, 0, 1)


def test_the_other_names_of_uniform_and_normal() -> None:
    assert InitializerSpec("random_uniform", -1, 2) == InitializerSpec("uniform", -1, 2)
    assert InitializerSpec("random_normal", 1, 2) == InitializerSpec("normal", 1, 2)
    assert InitializerSpec("random_uniform") == InitializerSpec("uniform", -0.05, 0.05)
    assert InitializerSpec("random_normal") == InitializerSpec("normal", 0.0, 0.05)


def test_a_fan_below_one_counts_as_one() -> None:
    assert variance_scaling(1.0, "fan_avg", "uniform", 0.5, 1) == ("uniform", -math.sqrt(3), math.sqrt(3))


def test_an_unknown_kind_is_reported_with_the_known_ones() -> None:
    with pytest.raises(BadSpec, match=r"'magic'.*truncated_normal.*random_uniform.*glorot_uniform"):
        InitializerSpec("magic")


finite = st.floats(allow_nan=False, allow_infinity=False)
in_float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
optimizers = st.builds(
    OptimizerSpec,
    st.sampled_from(["sgd", "adam", "keras"]),
    st.dictionaries(st.text(min_size=1, max_size=9), finite, max_size=5).map(lambda of: tuple(sorted(of.items()))),
    st.text(max_size=40),
)
evictions = st.sampled_from([EvictionSpec(max_rows=9), EvictionSpec(3, 2, every=7), EvictionSpec(ttl=3600, every=7)])
plain = st.builds(
    TableSpec,
    name=st.text("abcXYZ019._-/\u00e9", min_size=1, max_size=100),
    dim=st.integers(1, 65_536),
    vocabulary_size=st.none() | st.integers(1, 2**63 - 1),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    initializer=st.builds(InitializerSpec, st.sampled_from(["zeros", "constant", "normal"]), in_float32, st.just(0.5)),
    seed=st.integers(-(2**63), 2**63 - 1),
    optimizer=optimizers | st.just(OptimizerSpec.of("adamw", lazy=False)),
)
dynamic = plain.map(lambda spec: replace(spec, vocabulary_size=None, admission=AdmissionSpec(3)))
specs = plain | st.builds(lambda spec, eviction: replace(spec, eviction=eviction), dynamic, evictions)


@example(TableSpec("t", 8, eviction=EvictionSpec(ttl=3600, every=7)), 2, 1)
@given(specs, st.integers(1, 9), st.integers(0, 9))
def test_a_spec_comes_back_as_it_was(whole: TableSpec, shards: int, first: int) -> None:
    half = replace(whole, origin=ShardOrigin(1, 0, first, whole, 2))
    third = replace(whole, origin=ShardOrigin(shards, shards - 1, 4, half, 3))
    for spec in (whole, half, third, replace(whole, origin=ShardOrigin(5, 1))):
        assert spec_from_json(spec_to_json(spec)) == spec
        parsed = store_pb2.TableSpec.FromString(spec_to_message(spec).SerializeToString())
        assert spec_from_message(parsed) == spec
    assert (whole.whole, half.whole, third.whole) == (whole, whole, whole)


def test_what_was_not_said_is_not_written() -> None:
    """So that specs read as they were written before there was such a thing."""
    before = '"eviction": {"every": 1, "max_age": null, "max_rows": 9, "min_frequency": null}'
    assert before in spec_to_json(TableSpec("t", 8, eviction=EvictionSpec(max_rows=9)))
    adam = OptimizerSpec.of("adam")
    assert "lazy" not in spec_to_json(TableSpec("t", 8, optimizer=adam))
    assert adam != OptimizerSpec.of("adam", lazy=False)
    written = {spec_to_json(TableSpec("t", 8, eviction=EvictionSpec(ttl=ttl))) for ttl in (3600, 3600.0)}
    assert len(written) == 1


def test_what_a_foreign_client_leaves_out_takes_the_defaults() -> None:
    assert spec_from_message(store_pb2.TableSpec(name="t", dim=4)) == TableSpec("t", 4)


@pytest.mark.parametrize(
    ("message", "expected_message"),
    [
        (store_pb2.TableSpec(), "table name ''"),
        (store_pb2.TableSpec(name="t", dim=0), "dim"),
        (store_pb2.TableSpec(name="t", dim=4, vocabulary_size=-1), "vocabulary_size"),
        (store_pb2.TableSpec(name="t", dim=4, optimizer=store_pb2.Optimizer()), "optimizer has no name"),
        (store_pb2.TableSpec(name="t", dim=4, initializer=store_pb2.Initializer(kind="magic")), "'magic'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(message: store_pb2.TableSpec, expected_message: str) -> None:
    with pytest.raises(BadSpec, match=expected_message):
        spec_from_message(message)
