"""Which variables are shared over replicas, and why."""

import pytest

from elastable.embedding_store.composite.locations import (
    LocationSettings,
    TensorLocation,
    TensorLocationSettings,
    plan_tables,
    refuse_sharding,
)
from elastable.embedding_store.errors import BadInput, BadSpec, Unsupported
from elastable.replicas.groups.replica_grouping import CommGroup, ReplicaGrouping
from elastable.replicas.training.sharded_variables import (
    DenseVariable,
    VariablePlacement,
    plan_variables,
    sharding_of,
    update_domains,
)

SHARDED = TensorLocation(replicated_tensor_sharding=True)
PAIRS = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("consecutive", 2))
WEIGHTS = TensorLocationSettings(SHARDED)
KERNEL = DenseVariable("net/dense/kernel", (128, 64), slots=2)
BIAS = DenseVariable("net/dense/bias", (64,), slots=2)


def test_the_thresholds_of_popart() -> None:
    # ORACLES: fewer than 8192 elements, one replica, or an activation: no sharding. An override knows no threshold.
    assert WEIGHTS.min_elements_for_replicated_tensor_sharding == 8192
    everyone = ReplicaGrouping(4, 1, 4)
    assert sharding_of("weight", 8192, WEIGHTS, None, 4) == (everyone, "setting, 8,192 elements")
    assert sharding_of("weight", 8191, WEIGHTS, None, 4) == (
        None,
        "8,191 elements, fewer than min_elements_for_replicated_tensor_sharding=8,192",
    )
    assert sharding_of("weight", 8192, WEIGHTS, None, 1) == (None, "one replica")
    assert sharding_of("activation", 8192, WEIGHTS, None, 4)[0] is None
    assert sharding_of("weight", 30, WEIGHTS, SHARDED, 4) == (everyone, "override by name")
    assert sharding_of("weight", 8192, WEIGHTS, TensorLocation(), 4) == (None, "override by name")
    assert sharding_of("weight", 8192, TensorLocationSettings(), None, 4)[0] is None


def test_domains() -> None:
    assert sharding_of("weight", 30, WEIGHTS, PAIRS, 4)[0] == ReplicaGrouping(4, 1, 2)
    apart = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("orthogonal", 2))
    assert sharding_of("weight", 30, WEIGHTS, apart, 4)[0] == ReplicaGrouping(4, 2, 2)
    alone = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("consecutive", 1))
    assert sharding_of("weight", 30, WEIGHTS, alone, 4) == (None, "a sharding domain of one replica")
    with pytest.raises(BadInput, match="2 does not divide 3 replicas"):
        sharding_of("weight", 30, WEIGHTS, PAIRS, 3)


def test_a_plan() -> None:
    settings = LocationSettings(WEIGHTS, WEIGHTS, overrides={"bias/optimizer_state": PAIRS})
    everyone = ReplicaGrouping(4, 1, 4)
    small = "64 elements, fewer than min_elements_for_replicated_tensor_sharding=8,192"
    assert plan_variables([KERNEL, BIAS], settings, 4) == (
        VariablePlacement(KERNEL.name, "weight", 8192, 32768, 8192, everyone, "setting, 8,192 elements"),
        VariablePlacement(KERNEL.name, "optimizer_state", 16384, 65536, 16384, everyone, "setting, 8,192 elements"),
        VariablePlacement(BIAS.name, "weight", 64, 256, 256, None, small),
        VariablePlacement(BIAS.name, "optimizer_state", 128, 512, 256, ReplicaGrouping(4, 1, 2), "override by name"),
    )


def test_state_alone_and_weight_alone() -> None:
    halves = ReplicaGrouping(2, 1, 2)
    for settings, domains in (
        (LocationSettings(optimizer_state=WEIGHTS), [None, halves]),
        (LocationSettings(WEIGHTS), [halves, None]),
    ):
        lines = plan_variables([KERNEL], settings, 2)
        assert [line.domain for line in lines] == domains
        assert update_domains(lines) == {KERNEL.name: domains[1]}


def test_a_domain_without_sharding_has_no_effect() -> None:
    whole = TensorLocationSettings(TensorLocation(sharding_domain=CommGroup("consecutive", 2)))
    lines = plan_variables([KERNEL], LocationSettings(whole, TensorLocationSettings(PAIRS), whole), 4)
    assert [line.domain for line in lines] == [None, ReplicaGrouping(4, 1, 2)]
    refuse_sharding(LocationSettings(whole, whole, whole))


def test_an_optimizer_without_state_has_no_line_of_it() -> None:
    stateless = DenseVariable("kernel", (128, 64))
    (line,) = plan_variables([stateless], LocationSettings(WEIGHTS, TensorLocationSettings()), 2)
    assert line.domain is not None
    assert update_domains([line]) == {"kernel": line.domain}


def test_linked_tensors_share_a_domain() -> None:
    apart = LocationSettings(overrides={"kernel": SHARDED, "kernel/optimizer_state": PAIRS})
    with pytest.raises(BadSpec, match=r"over each 4 of 4 replicas .* over each 2 of 4 replicas .* linked"):
        plan_variables([KERNEL], apart, 4)
    # Written differently, the same replicas are the same domain.
    same = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("consecutive", 4))
    plan_variables([KERNEL], LocationSettings(overrides={"kernel": SHARDED, "kernel/optimizer_state": same}), 4)


def test_a_variable_sharded_twice() -> None:
    with pytest.raises(BadSpec, match=r"'net/dense/kernel' is sharded twice; give each variable once"):
        plan_variables([KERNEL, BIAS, KERNEL], LocationSettings(), 2)
    both = LocationSettings(overrides={"kernel": SHARDED, "dense/kernel": PAIRS})
    with pytest.raises(BadSpec, match=r"sharded twice: override 'kernel' names it, and 'dense/kernel'"):
        plan_variables([KERNEL, BIAS], both, 4)


def test_overrides_that_fit_nothing_or_too_much() -> None:
    with pytest.raises(BadSpec, match=r"'dense/kernle': there is no such variable; did you mean 'net/dense/kernel'"):
        plan_variables([KERNEL], LocationSettings(overrides={"dense/kernle": SHARDED}), 2)
    other = DenseVariable("net/other/kernel", (2, 2))
    with pytest.raises(BadSpec, match=r"'kernel' fits net/dense/kernel, net/other/kernel: name one"):
        plan_variables([KERNEL, other], LocationSettings(overrides={"kernel": SHARDED}), 2)


def test_a_constraint_needs_the_whole_weight() -> None:
    unit = DenseVariable("kernel", (128, 64), slots=1, constrained=True)
    lines = plan_variables([unit], LocationSettings(WEIGHTS, WEIGHTS), 2)
    assert [line.domain is None for line in lines] == [True, False]
    assert lines[0].reason == "its constraint needs all of it after every update"
    with pytest.raises(BadSpec, match="has a constraint"):
        plan_variables([unit], LocationSettings(overrides={"kernel": SHARDED}), 2)


def test_dense_variables_are_not_in_redis() -> None:
    redis = LocationSettings(weight=TensorLocationSettings(TensorLocation("redis")))
    with pytest.raises(BadSpec, match="weight in 'redis': dense variables live in the memory"):
        plan_variables([KERNEL], redis, 2)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(BadSpec, match="min_elements_for_replicated_tensor_sharding must not be negative, got -1"):
        TensorLocationSettings(min_elements_for_replicated_tensor_sharding=-1)
    with pytest.raises(BadSpec, match="accumulator with replicated_tensor_sharding"):
        LocationSettings(accumulator=WEIGHTS)


def test_a_job_with_a_master_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match=r"weight: .* together with async push: an async push is applied when it"):
        refuse_sharding(LocationSettings(WEIGHTS, WEIGHTS), "async")
    with pytest.raises(Unsupported, match=r"users: .* the master of a job holds"):
        refuse_sharding(LocationSettings(overrides={"users": SHARDED}))
    with pytest.raises(Unsupported, match="optimizer_state"):
        plan_tables({}, LocationSettings(optimizer_state=WEIGHTS))
    refuse_sharding(LocationSettings(), "async")
