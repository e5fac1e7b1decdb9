"""Constraints on tables: Keras' numbers, on the rows that were touched."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.master.keras.wrapping_optimizers import constrained

C = keras.constraints


class Own(C.Constraint):  # type: ignore[name-defined]
    """A person's own constraint."""


@pytest.mark.parametrize(
    "constraint",
    [
        C.NonNeg(),
        C.MaxNorm(0.7, axis=1),
        C.MaxNorm(0.7, axis=-1),
        C.UnitNorm(axis=1),
        C.MinMaxNorm(0.5, 0.9, rate=0.3, axis=[1]),
    ],
)
def test_touched_rows_are_constrained_as_in_keras(constraint: keras.constraints.Constraint) -> None:
    spec = OptimizerSpec.of("sgd", learning_rate=0.5, momentum=0.9)
    rows = row_optimizer(constrained("e", spec, constraint))
    random = np.random.default_rng(0)
    start = random.normal(size=(6, 8)).astype(np.float32)
    gradients = random.normal(size=(3, 8)).astype(np.float32)
    weights, slots = start.copy(), np.zeros((6, 8), np.float32)
    chosen = np.array([4, 0, 2])
    rows.apply(weights, slots, UpdateBatch(chosen, chosen, gradients, 0, 0.5))
    expected = np.asarray(constraint(start[[4, 0, 2]] - np.float32(0.5) * gradients))
    np.testing.assert_allclose(weights[[4, 0, 2]], expected, rtol=1e-6)
    assert np.array_equal(weights[[1, 3, 5]], start[[1, 3, 5]])
    assert rows.fused
    assert rows.slot_width(8) == 8


def test_another_epsilon_of_keras_goes_with_the_spec() -> None:
    """The rows may be updated in another process, which has an epsilon of its own, or no Keras at all."""
    spec, before = OptimizerSpec.of("sgd", learning_rate=0.5), keras.config.epsilon()
    usual = constrained("e", spec, C.UnitNorm(axis=1))
    assert "epsilon" not in usual.keras_config
    weights = np.full((1, 2), 0.1, np.float32)
    keras.config.set_epsilon(0.5)
    try:
        said = constrained("e", spec, C.UnitNorm(axis=1))
        expected = np.asarray(C.UnitNorm(axis=1)(weights))
    finally:
        keras.config.set_epsilon(before)
    batch = UpdateBatch(np.array([0]), np.array([0]), np.zeros((1, 2), np.float32), 0, 0.5)
    row_optimizer(said).apply(weights, np.zeros((1, 0), np.float32), batch)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_without_a_constraint_nothing_changes() -> None:
    spec = OptimizerSpec.of("sgd", learning_rate=0.5)
    assert constrained("e", spec, None) is spec


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (C.MaxNorm(2.0), r"layer 'e'.*MaxNorm\(axis=0\).*use axis=1"),
        (C.UnitNorm(axis=0), "UnitNorm"),
        (Own(), "Own"),
    ],
)
def test_what_joins_rows_is_refused_by_name(constraint: object, told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        constrained("e", OptimizerSpec(), constraint)


def max_norm(config: object) -> str:
    """A spec's config with one of MaxNorm that Keras would not write."""
    constraint = {"module": "keras.constraints", "class_name": "MaxNorm", "config": config}
    return json.dumps({"optimizer": {"name": "sgd", "hyperparameters": [], "config": ""}, "constraint": constraint})


@pytest.mark.parametrize(
    "config",
    [
        "",
        "{}",
        '{"optimizer": 3, "constraint": 4}',
        "[" * 100_000,
        max_norm(5),
        max_norm({"axis": 1, "max_value": [1, 2]}),
        max_norm({"axis": 1, "max_value": None}),
    ],
)
def test_a_spec_without_a_config_is_refused(config: str) -> None:
    with pytest.raises(BadSpec, match="constrained"):
        row_optimizer(OptimizerSpec("constrained", (), config))
