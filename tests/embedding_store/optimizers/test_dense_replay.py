"""Rows that follow every step: equal to Keras' dense optimizers over a thousand steps of sparse batches."""

from collections.abc import Callable, Mapping
from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.optimizers.registry import known_dense_forms, row_optimizer
from elastable.master.model.keras_optimizer import FUSED_CLASSES, table_optimizer
from tests.contracts.reference_rows import REFERENCES
from tests.contracts.store_samples import create_tables
from tests.untyped import Keywords

ROWS, DIM, STEPS = 48, 4, 1000
TOLERANCE = 1e-5

CASES: dict[str, tuple[Callable[..., keras.Optimizer], Keywords]] = {
    **{
        f"{name} {number}": (kind, variant)
        for kind, name in FUSED_CLASSES.items()
        if name in known_dense_forms()
        for number, variant in enumerate(REFERENCES[name].variants)
    },
    "adam": (keras.optimizers.Adam, {}),
    "adam 0.99 0.999": (keras.optimizers.Adam, {"beta_1": 0.99}),
    "adam 0.9 0.99": (keras.optimizers.Adam, {"beta_2": 0.99}),
    "adam 0 0.999": (keras.optimizers.Adam, {"beta_1": 0.0}),
    "adam 0.5 0.9999": (keras.optimizers.Adam, {"beta_1": 0.5, "beta_2": 0.9999}),
    "adam large epsilon": (keras.optimizers.Adam, {"epsilon": 1e-2}),
    "rmsprop": (keras.optimizers.RMSprop, {}),
    "adamax, whose norm stays": (keras.optimizers.Adamax, {"beta_2": 1.0}),
}

Batch = tuple[Int64, Float32, float]
"""Ids, each once, their gradients, and the learning rate."""


@lru_cache(maxsize=1)
def batches() -> tuple[Batch, ...]:
    """A thousand steps.

    Rows 0 to 15 come and go, 16 to 23 come in every 100th step or more seldom,
    24 once, early, with what Adam's epsilon meets; 25 at the first step and at
    step 900; others never. Every seventh step touches nothing. The rate warms
    up, falls, stands still at zero, and begins anew.
    """
    random = np.random.default_rng(5)
    made = []
    for step in range(STEPS):
        often = random.choice(16, size=0 if step % 7 == 6 else random.integers(1, 5), replace=False)
        ids = [*often, *(16 + i for i in range(8) if step % (100 + 40 * i) == 3)]
        ids += [24] * (step == 2) + [25] * (step in (0, 900))
        gradients = random.normal(size=(len(ids), DIM)) * 10.0 ** random.integers(-9, 1, size=(len(ids), DIM))
        rate = 0.01 * min(1.0, step / 20) * (1 + np.cos(step % 500 / 500 * np.pi)) / 2
        made.append((np.array(ids, np.int64), gradients.astype(np.float32), 0.0 if 490 < step < 500 else float(rate)))
    return tuple(made)


def spec_of(optimizer: keras.optimizers.Optimizer) -> OptimizerSpec:
    return table_optimizer(optimizer, lazy=False)


def of_keras(optimizer: keras.optimizers.Optimizer, start: Float32) -> tuple[Float32, list[Float32]]:
    """A dense variable after Keras' steps, and its slots."""
    variable = keras.Variable(start, dtype="float32")
    optimizer.build([variable])

    dense = np.zeros((STEPS, *start.shape), np.float32)
    for number, (ids, gradients, _) in enumerate(batches()):
        dense[number, ids] = gradients

    @tf.function
    def every_step(gradients: tf.Tensor, rates: tf.Tensor) -> None:
        for number in tf.range(STEPS):
            optimizer.learning_rate.assign(rates[number])
            optimizer.apply([gradients[number]], [variable])

    every_step(tf.constant(dense), tf.constant([rate for *_, rate in batches()], tf.float32))
    own = (optimizer.iterations, optimizer.learning_rate)
    slots = [np.array(slot) for slot in optimizer.variables if not any(slot is known for known in own)]
    return np.array(variable), [slot for slot in slots if slot.shape == start.shape]


def of_store(store: MemoryStore, every: int | None = None, replay_epoch: int | None = None) -> None:
    """The same steps on the store's table "t", which is read after each `every`th; replay epochs are of `replay_epoch`
    steps."""
    for step, (ids, gradients, rate) in enumerate(batches()):
        updates: Mapping[str, TableUpdate] = {"t": TableUpdate(ids, gradients)} if len(ids) else {}
        ends = replay_epoch is not None and step % replay_epoch == 0
        store.commit(Commit(step + 1, updates, step, {"t": rate}, ends_replay_epoch=ends))
        if every and step % every == 0:
            store.lookup({"t": np.arange(ROWS)})


def close(ours: Float32, theirs: Float32, tolerance: float = TOLERANCE) -> bool:
    """Whether values agree, relative to themselves or, where they are small, to the size of them all."""
    return np.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(np.sqrt(np.mean(np.square(theirs)))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_thousand_sparse_steps_equal_keras_dense_ones(case: str) -> None:
    """In one replay epoch, or in replay epochs of four steps, of which a row may have missed 225."""
    kind, settings = CASES[case]
    table = TableSpec("t", DIM, ROWS, optimizer=spec_of(kind(learning_rate=0.01, **settings)))
    with create_tables(MemoryStore(threads=1), table) as store:
        start = store.lookup({"t": np.arange(ROWS)})["t"]
    keras_has = of_keras(kind(learning_rate=0.01, **settings), start)
    _equals_keras(table, None if list(CASES).index(case) // 2 % 2 else 4, start, *keras_has)


def _equals_keras(
    table: TableSpec, replay_epoch: int | None, start: Float32, theirs: Float32, slots: list[Float32]
) -> None:
    with create_tables(MemoryStore(threads=1), table) as store:
        ids = np.arange(ROWS)
        of_store(store, replay_epoch=replay_epoch)
        ours, block = store.lookup({"t": ids})["t"], store.read_rows("t", ids)
    assert close(ours, theirs), np.abs(ours - theirs).max()
    assert np.array_equal(block.weights, ours[block.ids])
    names = [slot.name for slot in row_optimizer(table.optimizer).slots]
    assert len(names) == len(slots)
    for number, (name, slot) in enumerate(zip(names, slots, strict=True)):
        assert close(block.slots[:, number * DIM : (number + 1) * DIM], slot[block.ids]), name
    # Rows that the batches leave alone do move, which lazy ones would not.
    if dict(table.optimizer.hyperparameters).get("weight_decay"):
        assert not np.array_equal(ours[30:], start[30:])


@pytest.mark.parametrize("beta_2", [0.5, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("beta_1", [0.3, 0.9, 0.995])
def test_one_gap_equals_the_sum_in_double(beta_1: float, beta_2: float) -> None:
    """Any pair of betas, any gap, any size of gradients against epsilon."""
    sizes = 10.0 ** np.arange(-12, 3)
    optimizer = OptimizerSpec.of("adam", lazy=False, learning_rate=0.1, beta_1=beta_1, beta_2=beta_2)
    form = row_optimizer(optimizer).dense_form
    assert form is not None
    with create_tables(MemoryStore(threads=1), TableSpec("t", len(sizes), 2, optimizer=optimizer)) as store:
        ids = np.zeros(1, np.int64)
        store.commit(Commit(1, {"t": TableUpdate(ids, sizes[None].astype(np.float32))}, 0, {}))
        block = store.read_rows("t", ids)
        m, v = (part.astype(np.float64) for part in np.split(block.slots[0], 2))
        w, moved = block.weights[0].astype(np.float64), np.zeros(len(sizes))
        for step in range(1, 901):
            m, v = m * form.factors[0], v * form.factors[1]
            moved += form.scale(step, 0.1) * m / (np.sqrt(v) + form.epsilon)
            store.commit(Commit(step + 1, {}, step, {}))
            if step in (1, 2, 3, 10, 50, 333, 900):
                ours = store.lookup({"t": ids})["t"][0]
                assert np.allclose(ours, w + moved, rtol=1e-6, atol=2e-6 * np.abs(moved).max())


def test_reads_threads_and_layout_change_no_bit() -> None:
    results = set()
    for every, threads, direct_bytes in ((None, 1, 0), (None, 3, 0), (1, 1, 1 << 20), (13, 3, 1 << 20)):
        with MemoryStore(threads, direct_bytes=direct_bytes) as store:
            store.create_table(TableSpec("t", DIM, ROWS, optimizer=OptimizerSpec.of("adamw", lazy=False)))
            of_store(store, every)
            results.add(store.lookup({"t": np.arange(ROWS)})["t"].tobytes())
    assert len(results) == 1
