"""Calls of layers inside of a step, with BETs made by hand."""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.tables.grouping import unique_ids
from elastable.worker.rows.scope import PlanScope, StepScope, entered

Rows = Callable[[object, np.ndarray], np.ndarray]


def record_calls(call: Callable[..., object]) -> list[tuple[keras.layers.Layer, np.ndarray]]:
    """(layer, int64 ids) of every embedding call that `call` makes."""
    with entered(PlanScope()) as plan:
        call()
    return [(layer, ids.numpy()) for layer, ids in plan.calls]


def run_in_step(
    call: Callable[..., object], rows: Rows, graph: bool = False, scale: Callable[..., object] | None = None
) -> tf.RaggedTensor | tf.Tensor:
    """The output of `call` in a step scope, and (table, unique ids, BET gradient) of every table.

    Args:
        call: Calls layers.
        rows: (layer, unique ids) -> BET.
        graph: Whether it runs inside of a `tf.function`.
        scale: Turns the output into the scalar that is differentiated; None: its sum.
    """
    calls = record_calls(call)
    tables = dict.fromkeys(layer.table_name for layer, _ in calls)
    unique: dict[str, np.ndarray] = {}
    inverses: list[object] = [None] * len(calls)
    layers = {layer.table_name: layer for layer, _ in calls}
    for table in tables:
        mine = [number for number, (layer, _) in enumerate(calls) if layer.table_name == table]
        unique[table], inverse = unique_ids(np.concatenate([calls[number][1] for number in mine]))
        ends = np.cumsum([len(calls[number][1]) for number in mine])[:-1]
        for number, part in zip(mine, np.split(inverse, ends), strict=True):
            inverses[number] = tf.constant(part)
    bets = {table: tf.constant(rows(layers[table], unique[table])) for table in tables}

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(list(bets.values()))
            with entered(StepScope([layer for layer, _ in calls], inverses, bets)):
                output = call()
            loss = tf.reduce_sum(output) if scale is None else scale(output)
        gradients = tape.gradient(loss, [bets[table] for table in tables])
        return output, [tf.convert_to_tensor(gradient) for gradient in gradients]

    output, gradients = (tf.function(step) if graph else step)()
    return output, [(table, unique[table], gradient.numpy()) for table, gradient in zip(tables, gradients, strict=True)]


def ids_as_rows(columns: int) -> Rows:
    """A table with E[i] = i in every column."""

    def rows(layer: object, ids: np.ndarray) -> np.ndarray:
        return np.repeat(ids.astype(np.float32)[:, np.newaxis], columns, axis=1)

    return rows


def column(values: Sequence[float], columns: int = 8) -> np.ndarray:
    """float32 `[n, columns]` with values[i] in row i."""
    return np.repeat(np.asarray(values, np.float32)[:, np.newaxis], columns, axis=1)
