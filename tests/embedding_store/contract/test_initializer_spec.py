import math

import pytest

from elastable.embedding_store.contract.spec import (
    SCALED_INITIALIZERS,
    InitializerSpec,
    TableSpec,
    spec_from_json,
    spec_to_json,
    variance_scaling,
)
from elastable.embedding_store.errors import BadSpec


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
    assert (
        TableSpec("t", 24, initializer=InitializerSpec(kind, 1000)).initializer
        == TableSpec("t", 24, 1000, initializer=InitializerSpec(kind)).initializer
    )
    with pytest.raises(BadSpec, match="a is a number of rows"):
        InitializerSpec(kind, 0.5)
    with pytest.raises(BadSpec, match="b is not used"):
        InitializerSpec(kind, 0, 1)


def test_the_other_names_of_uniform_and_normal() -> None:
    assert InitializerSpec("random_uniform", -1, 2) == InitializerSpec("uniform", -1, 2)
    assert InitializerSpec("random_normal", 1, 2) == InitializerSpec("normal", 1, 2)
    assert InitializerSpec("random_uniform") == InitializerSpec("uniform", -0.05, 0.05)
    assert InitializerSpec("random_normal") == InitializerSpec("normal", 0.0, 0.05)


def test_a_resolved_spec_survives_the_way_through_json() -> None:
    spec = TableSpec("t", 24, 1000, initializer=InitializerSpec("he_normal"))
    assert spec_from_json(spec_to_json(spec)) == spec


def test_a_fan_below_one_counts_as_one() -> None:
    assert variance_scaling(1.0, "fan_avg", "uniform", 0.5, 1) == ("uniform", -math.sqrt(3), math.sqrt(3))


def test_an_unknown_kind_is_reported_with_the_known_ones() -> None:
    with pytest.raises(BadSpec, match=r"'magic'.*truncated_normal.*random_uniform.*glorot_uniform"):
        InitializerSpec("magic")
