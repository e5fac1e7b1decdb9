"""Every Keras optimizer is fused, run on the block, or refused by name."""

import json
from collections.abc import Callable

import keras
import numpy as np
import pytest

from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import Commit, TableUpdate, UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadSpec, ModelError, Unsupported
from elastable.embedding_store.optimizers.base import KERAS_BLOCK
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.master.model.keras_block import canonical_config
from elastable.master.model.keras_optimizer import FUSED_CLASSES, learning_rate_of, table_optimizer
from tests.contracts.reference_rows import REFERENCES
from tests.keras_table.optimizer_cases import Halved

K = keras.optimizers

BLOCK: list[tuple[str, Callable[[], keras.optimizers.Optimizer]]] = [
    ("keras", lambda: Halved(0.1)),
    ("keras", lambda: K.Muon(0.1)),
]
REFUSED: list[tuple[str, Callable[[], keras.optimizers.Optimizer]]] = [
    ("Adafactor.*cannot be split by row", lambda: K.Adafactor(0.1)),
    ("ScheduleFreeAdamW.*does not start from a constant", lambda: K.ScheduleFreeAdamW(0.1)),
    ("Muon does not treat the rows", lambda: K.Muon(0.1, exclude_embeddings=False)),
    ("Lamb does not treat the rows", lambda: K.Lamb(0.1)),
    ("LossScaleOptimizer.*grads_to_wait", lambda: K.LossScaleOptimizer(K.SGD(0.1, gradient_accumulation_steps=2))),
    ("use_ema=True, gradient_acc", lambda: K.SGD(0.1, use_ema=True, gradient_accumulation_steps=2)),
    ("function as learning rate", lambda: K.SGD(lambda: 0.1)),
    # Whatever their rates: one too small to move a row in two steps by what rows have in common, or 0 at first.
    ("Lamb does not treat the rows", lambda: K.Lamb(1e-7)),
    ("Lamb does not treat the rows", lambda: K.Lamb(warming_up())),
    ("Muon does not treat the rows", lambda: K.Muon(warming_up(), exclude_embeddings=False)),
]


def warming_up() -> keras.optimizers.schedules.LearningRateSchedule:
    return K.schedules.CosineDecay(0.0, 100, warmup_target=0.1, warmup_steps=10)


def train_in_keras(optimizer: keras.optimizers.Optimizer, weights: Float32, gradients: list[Float32]) -> Float32:
    variable = keras.Variable(weights, name="embeddings")
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    return np.asarray(variable.numpy())


@pytest.mark.parametrize("kind", FUSED_CLASSES)
def test_a_fused_optimizer_has_the_hyperparameters_of_keras_own(kind: type[keras.optimizers.Optimizer]) -> None:
    """With them its numbers are Keras' own: tests/embedding_store/optimizers/test_row_optimizer.py."""
    name = FUSED_CLASSES[kind]
    for values in REFERENCES[name].trained:
        found = row_optimizer(table_optimizer(kind(**values)))
        assert found.spec.name == name
        assert found.hyperparameters == {
            **FUSED[name].defaults,
            **values,
            "learning_rate": np.float32(values["learning_rate"]),
        }


@pytest.mark.parametrize(("name", "make"), BLOCK)
def test_with_all_rows_touched_the_numbers_are_keras_own(name: str, make: Callable[..., object]) -> None:
    spec = table_optimizer(make())
    assert spec.name == name
    rows = row_optimizer(spec)
    random = np.random.default_rng(3)
    start = random.normal(size=(5, 4)).astype(np.float32)
    gradients = [random.normal(size=(5, 4)).astype(np.float32) for _ in range(4)]
    weights, slots = start.copy(), np.tile(rows.initial_slots(4), (5, 1))
    for step, gradient in enumerate(gradients):
        batch = UpdateBatch(np.arange(5), np.arange(5), gradient, step, rows.default_learning_rate)
        rows.apply(weights, slots, batch)
    np.testing.assert_allclose(weights, train_in_keras(make(), start, gradients), rtol=2e-5, atol=1e-6)


def test_every_optimizer_of_keras_is_decided() -> None:
    decided = (
        {type(make()) for _, make in BLOCK + REFUSED[:4]} | FUSED_CLASSES.keys() | {K.LossScaleOptimizer, K.Optimizer}
    )
    names = [name for name in dir(K) if isinstance(getattr(K, name), type)]
    there = {getattr(K, name) for name in names if issubclass(getattr(K, name), K.Optimizer)}
    multi = {getattr(K, name) for name in ("MultiOptimizer",) if hasattr(K, name)}
    assert there - decided - multi == set()


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(message: str, make: Callable[..., object]) -> None:
    with pytest.raises(Unsupported, match=message):
        table_optimizer(make())


def test_no_optimizer_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"model\.compile"):
        table_optimizer(None)


def test_equal_optimizers_give_equal_specs() -> None:
    assert table_optimizer(Halved(0.1)) == table_optimizer(Halved(0.1))
    assert table_optimizer(K.Adam(0.1)) == table_optimizer(K.Adam(0.1, clipnorm=1.0))
    assert table_optimizer(K.Adam(0.1)) != table_optimizer(K.Adam(0.2))


def test_weight_decay_can_be_excluded_for_tables_that_keras_itself_trains() -> None:
    """Also a decay that an optimizer has besides Keras' `weight_decay`."""

    def muon() -> keras.optimizers.Optimizer:
        optimizer = K.Muon(0.1, adam_weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["embeddings"])
        return optimizer

    rows, start, gradient = row_optimizer(table_optimizer(muon())), np.ones((5, 4), np.float32), np.eye(5, 4)
    weights, slots = start.copy(), np.tile(rows.initial_slots(4), (5, 1))
    rows.apply(weights, slots, UpdateBatch(np.arange(5), np.arange(5), gradient.astype(np.float32), 0, 0.1))
    np.testing.assert_allclose(weights, train_in_keras(muon(), start, [gradient.astype(np.float32)]), rtol=1e-6)
    assert weights[4, 0] == 1.0
    assert table_optimizer(muon()) != table_optimizer(K.Muon(0.1, adam_weight_decay=0.5))


def test_schedules_and_assigned_rates_are_read_at_the_step() -> None:
    schedule = K.schedules.PiecewiseConstantDecay([2], [0.5, 0.25])
    optimizer = K.SGD(schedule)
    assert learning_rate_of(optimizer) == 0.5
    optimizer.iterations.assign(3)
    assert learning_rate_of(optimizer) == 0.25
    optimizer = K.SGD(0.5)
    optimizer.learning_rate = 0.125
    assert learning_rate_of(optimizer) == 0.125


HUGE_LAYER = {
    "module": "keras.layers",
    "class_name": "Dense",
    "config": {"units": 40_000},
    "build_config": {"input_shape": [None, 40_000]},
}
MUON = {"module": "keras.optimizers", "class_name": "Muon"}
OPTIMIZER = {"module": "keras.optimizers", "class_name": "Adamax", "config": {"learning_rate": 0.1}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (HUGE_LAYER, "'Dense' is no optimizer"),
        (OPTIMIZER | {"config": {"learning_rate": HUGE_LAYER}}, "'Dense' is no optimizer"),
        (OPTIMIZER | {"config": {"name": [{"deep": HUGE_LAYER}]}}, "'Dense' is no optimizer"),
        ({"module": "builtins", "class_name": "eval", "config": {}, "registered_name": "eval"}, "'eval' is no"),
        ({"module": "keras.optimizers", "class_name": "deserialize", "config": {}}, "'deserialize' is no optimizer"),
        (
            {"module": "keras.optimizers.schedules", "class_name": "ExponentialDecay", "config": {}},
            "names no optimizer",
        ),
        ([1], "names no optimizer"),
        (MUON | {"config": {"ns_steps": 101, "exclude_embeddings": False}}, "ns_steps=101; the most are 100"),
        (MUON | {"config": {"adam_beta_1": "x"}}, "Muon fails in its first steps: TypeError"),
        (MUON | {"config": {"exclude_layers": ["("], "exclude_embeddings": False}}, "Muon fails in its first steps"),
        (OPTIMIZER | {"class_name": "Optimizer"}, "Optimizer fails in its first steps: NotImplementedError"),
    ],
)
def test_nothing_but_an_optimizer_is_made_from_a_spec(config: object, why: str) -> None:
    with pytest.raises(BadSpec, match=why):
        row_optimizer(OptimizerSpec("keras", (), json.dumps(config)))


def test_a_config_that_is_too_long_or_too_deep_is_refused() -> None:
    for text, why in (
        (" " * (65 << 10), "the most are"),
        ("[" * 60_000, "recursion"),
        ('{"class_name": 3}', "'3' is no"),
        ("{}", "no config of a Keras optimizer"),
    ):
        with pytest.raises(BadSpec, match=why):
            row_optimizer(OptimizerSpec("keras", (), text))


@keras.saving.register_keras_serializable(package="test")
class RowNorm(keras.optimizers.SGD):
    """Divides each row's gradient by its length: columns cannot be updated apart."""

    def update_step(
        self, gradient: keras.KerasTensor, variable: keras.Variable, learning_rate: keras.KerasTensor
    ) -> None:
        length = keras.ops.sqrt(keras.ops.sum(gradient * gradient, axis=-1, keepdims=True)) + 1e-6
        super().update_step(gradient / length, variable, learning_rate)


def table(optimizer: keras.optimizers.Optimizer, rate: float = 0.01) -> TableSpec:
    config = json.dumps(canonical_config(optimizer, rate, None))
    return TableSpec("t", 7, None, optimizer=OptimizerSpec(KERAS_BLOCK, (("learning_rate", rate),), config))


def partitioned(strategy: str) -> PartitionedStore:
    return PartitionedStore([MemoryStore(threads=1) for _ in range(3)], strategy)


def trained(store: EmbeddingStore, spec: TableSpec) -> np.ndarray:
    with store:
        store.create_table(spec)
        random = np.random.default_rng(4)
        for version in range(1, 4):
            ids = random.choice(1500, 1100, replace=False)  # more than one block of Keras' own
            update = TableUpdate(ids, random.normal(size=(1100, 7)).astype(np.float32))
            store.commit(Commit(version, {"t": update}, version - 1, {}))
        return store.lookup({"t": np.arange(1500)})["t"]


def test_the_same_bits_by_either_strategy() -> None:
    spec = table(keras.optimizers.Adam())
    plain = trained(MemoryStore(threads=1), spec)
    for strategy in ("token", "encoding"):
        np.testing.assert_array_equal(trained(partitioned(strategy), spec), plain, err_msg=strategy)


def test_an_optimizer_that_joins_columns_needs_whole_rows() -> None:
    spec = table(RowNorm())
    for refused in (spec, table(RowNorm(), 1e-7), table(RowNorm(), 0.0)):
        with partitioned("encoding") as store, pytest.raises(Unsupported, match=r"'t'.*'RowNorm' updates whole rows"):
            store.create_table(refused)
    np.testing.assert_array_equal(trained(partitioned("token"), spec), trained(MemoryStore(threads=1), spec))
