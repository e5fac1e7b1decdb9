"""Every elementwise Keras optimizer moves parts as it moves the whole; others are refused."""

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import pytest

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.master.model.keras_optimizer import FUSED_CLASSES
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.training.part_optimizer import (
    PartOptimizer,
    clip_parts,
    refuse_optimizer,
    refuse_parts,
    slots_of,
)
from elastable.replicas.training.replica_training import ReplicaWeights, value_of
from elastable.replicas.training.sharded_variables import DenseVariable, plan_variables
from tests.contracts.reference_rows import REFERENCES
from tests.replicas.training.models import BOTH, STATE, WEIGHTS

kinds = keras.optimizers
OPTIMIZERS: dict[str, Callable[[], object]] = {
    **{
        f"{name} {number}": partial(kind, **values)
        for kind, name in FUSED_CLASSES.items()
        for number, values in enumerate(REFERENCES[name].trained[1:])
    },
    "schedule": lambda: kinds.SGD(kinds.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "ema": lambda: kinds.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: kinds.Adam(0.01, gradient_accumulation_steps=2),
    "clipvalue": lambda: kinds.SGD(0.1, clipvalue=0.3),
    "clipnorm": lambda: kinds.SGD(0.1, clipnorm=0.3),
    "global_clipnorm": lambda: kinds.SGD(0.1, global_clipnorm=0.3),
}
SHAPES = ((5, 6), (3,))
STEPS = 3


def initial() -> list[Array]:
    random = np.random.default_rng(1)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def named_variables() -> list[keras.Variable]:
    """net/v0 and net/v1."""
    with keras.name_scope("net"):
        return [keras.Variable(value, name=f"v{place}") for place, value in enumerate(initial())]


def gradients(step: int) -> list[Array]:
    random = np.random.default_rng([2, step])
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def of_keras(make: Callable[[], keras.Model]) -> list[Array]:
    variables = named_variables()
    optimizer = make()
    optimizer.build(variables)
    for step in range(STEPS):
        optimizer.apply([keras.ops.convert_to_tensor(gradient) for gradient in gradients(step)])
    optimizer.finalize_variable_values(variables)
    return [np.array(variable) for variable in variables]


def of_replicas(make: Callable[[], object], size: int, locations: LocationSettings) -> list[Array]:
    """The same, by replicas that each compute a part of the gradient; what is shared is in `locations`."""

    def work(group: ReplicaGroup) -> list[Array]:
        variables = named_variables()
        slots = slots_of(make())
        dense = [DenseVariable(variable.path, tuple(variable.shape), 4, slots) for variable in variables]
        weights = ReplicaWeights(variables, plan_variables(dense, locations, size), group)
        optimizer = PartOptimizer(make(), variables, weights.targets)
        for step in range(STEPS):
            weights.make_whole()
            weights.give_back()
            # One replica has the whole gradient, so that the sum is it to the bit.
            mine = [gradient * np.float32(group.rank == step % size) for gradient in gradients(step)]
            reduced = weights.exchange.reduce(mine, weights.layouts)
            clipped = clip_parts(group, optimizer.clipping, reduced, weights.layouts)
            weights.begin_update()
            optimizer.apply(clipped, (True, True))
            weights.end_update()
        weights.make_whole()
        weights.begin_update()
        optimizer.finish()
        weights.end_update()
        weights.make_whole()
        return [np.array(value_of(variable)) for variable in variables]

    found = run_threads(size, work)
    for other in found[1:]:
        assert [array.tobytes() for array in other] == [array.tobytes() for array in found[0]]
    return found[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_move_as_the_whole(name: str) -> None:
    make = OPTIMIZERS[name]
    expected = of_keras(make)
    locations = BOTH if list(OPTIMIZERS).index(name) % 2 else STATE
    for found, want in zip(of_replicas(make, 4 if name == "adam 0" else 2, locations), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-6, atol=1e-7)
        assert not np.array_equal(want, initial()[0])


@pytest.mark.parametrize("name", ["adam 0", "ftrl 0", "global_clipnorm"])
def test_sharding_changes_no_bit(name: str) -> None:
    whole = of_replicas(OPTIMIZERS[name], 2, LocationSettings())
    for locations in (STATE, BOTH, WEIGHTS):
        for found, want in zip(of_replicas(OPTIMIZERS[name], 2, locations), whole, strict=True):
            assert found.tobytes() == want.tobytes()


def test_weight_decay_leaves_out_what_the_optimizer_leaves_out() -> None:
    def make() -> keras.optimizers.Optimizer:
        optimizer = kinds.AdamW(0.01, weight_decay=0.9)
        optimizer.exclude_from_weight_decay(var_names=["net/v1"])
        return optimizer

    for found, want in zip(of_replicas(make, 2, STATE), of_keras(make), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-6, atol=1e-7)


def test_how_many_slots_an_optimizer_keeps() -> None:
    for kind, name in FUSED_CLASSES.items():
        for values in REFERENCES[name].trained:
            assert slots_of(kind(**values)) == len(row_optimizer(OptimizerSpec.of(name, **values)).slots), name
    assert slots_of(OPTIMIZERS["ema"]()) == 3


@pytest.mark.parametrize("kind", [kinds.Adafactor, kinds.Lamb, kinds.Muon])
def test_an_optimizer_that_looks_at_whole_variables_is_refused(kind: type[keras.optimizers.Optimizer]) -> None:
    refuse_parts(kind(0.01), [])
    with pytest.raises(Unsupported, match=rf"{kind.__name__} cannot update net/kernel in parts.*known .*Adam, .*AdamW"):
        refuse_parts(kind(0.01), ["net/kernel"])


def test_a_custom_optimizer_may_declare_itself_elementwise() -> None:
    class Own(keras.optimizers.SGD):
        pass

    with pytest.raises(Unsupported, match="Own cannot update v in parts"):
        refuse_parts(Own(0.1), ["v"])
    Own.elementwise = True
    refuse_parts(Own(0.1), ["v"])


def test_unsupported_optimizers_are_refused() -> None:
    with pytest.raises(Unsupported, match="LossScaleOptimizer is not supported"):
        refuse_optimizer(kinds.LossScaleOptimizer(kinds.SGD(0.1)))
    with pytest.raises(Unsupported, match="gradient_accumulation_steps and clipping"):
        refuse_optimizer(kinds.SGD(0.1, gradient_accumulation_steps=2, clipnorm=1.0))
    with pytest.raises(Unsupported, match="a function as learning rate"):
        refuse_optimizer(kinds.SGD(lambda: 0.1))
    built = kinds.Adam(0.1)
    built.build([keras.Variable(np.zeros(3, np.float32))])
    with pytest.raises(ModelError, match="Adam has been built already"):
        refuse_optimizer(built)

    class Closed(keras.optimizers.SGD):
        def __init__(self, needed: float) -> None:
            super().__init__(needed)

    with pytest.raises(ModelError, match="Closed cannot be made from its get_config"):
        slots_of(Closed(0.1))
