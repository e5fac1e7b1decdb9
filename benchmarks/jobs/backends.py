"""`et.fit` on Keras' JAX or PyTorch backend, against plain Keras and against the dense part alone, on the same backend.

The click model with a table of 100,000 rows for each of 26 features, uniform ids, batches of 2,048; and of 5 million
rows in one table, against 100,000. All contenders are in this process, and take turns of an epoch.

    KERAS_BACKEND=jax python -m benchmarks.jobs.backends
"""

import sys
from collections.abc import Callable, Sequence

import keras
import numpy as np

import elastable as et
from benchmarks.click_job.draws import batches
from benchmarks.click_job.model import click_model
from benchmarks.click_job.sizes import BATCH, DIM, FEATURES
from benchmarks.harness import Row, compare, interleaved, publish, rate
from elastable.master.backend.contract import array_backend

_ROWS, _MANY = 100_000, 5_000_000
_STEPS, _ROUNDS = 24, 7
_OF_DENSE = {"SGD": 0.75}
_OF_KERAS = {"jax": {"SGD": 4.0, "Adam": 8.0}, "torch": {"SGD": 4.0, "Adam": 15.0}}
_OF_SMALL = {"Adam": 0.85}


def main() -> None:
    """Prints the figures, and writes `results/backends_NAME.json`."""
    name = keras.config.backend()
    if name not in _OF_KERAS:
        sys.exit("set KERAS_BACKEND to jax or torch: for TensorFlow there is benchmarks.jobs.click")
    rows = [row for optimizer in ("SGD", "Adam") for row in _against(name, optimizer)]
    publish(f"backends_{name}", f"et.fit on Keras' {name} backend", rows)


def _against(name: str, optimizer: str) -> list[Row]:
    works = {
        "ours": _fits(et.Embedding, optimizer, FEATURES, _ROWS),
        "plain": _fits(keras.layers.Embedding, optimizer, FEATURES, _ROWS),
        "dense": _dense_steps(optimizer),
        "small": _fits(et.Embedding, optimizer, 1, _ROWS),
        "large": _fits(et.Embedding, optimizer, 1, _MANY),
    }
    for work in works.values():
        work()  # compiles
    examples = _STEPS * BATCH
    paces = interleaved({key: rate(work, examples, 1.0) for key, work in works.items()}, _ROUNDS)
    what = f"{name}, {optimizer}"

    def row(text: str, ours: str, theirs: str, floor: float | None) -> Row:
        return compare(f"{what}, {text}", "examples/s", paces[ours], paces[theirs], floor)

    return [
        row("26 tables of 100,000 rows, against plain Keras", "ours", "plain", _OF_KERAS[name].get(optimizer)),
        row("26 tables of 100,000 rows, against the dense step alone", "ours", "dense", None),
        row("one table of 100,000 rows, against the dense step alone", "small", "dense", _OF_DENSE.get(optimizer)),
        row("5 million rows against 100,000", "large", "small", _OF_SMALL.get(optimizer)),
    ]


def _fits(layer: type[keras.Layer], optimizer: str, tables: int, rows: int) -> Callable[[], object]:
    """An epoch of `et.fit`, or of plain Keras."""
    keras.utils.set_random_seed(1)
    model = click_model([layer(rows, DIM, name=f"table_{number}") for number in range(tables)], optimizer)
    ids, clicks = (np.concatenate(part[:_STEPS]) for part in batches(rows))
    if layer is keras.layers.Embedding:
        return lambda: model.fit(ids, clicks, batch_size=BATCH, shuffle=False, verbose=0)
    return lambda: et.fit(model, ids, clicks, batch_size=BATCH, shuffle=False, verbose=0)


def _dense_steps(optimizer: str) -> Callable[[], object]:
    """As many steps of the dense part alone, down to the gradient of its rows, and its optimizer's update."""
    model = click_model([_Rows()], optimizer)
    model.optimizer.build(model.trainable_variables)
    backend, given = array_backend(), np.zeros((BATCH, FEATURES), np.int64)
    rows, clicks = np.random.default_rng(0).normal(size=(BATCH, FEATURES, DIM)).astype(np.float32), batches(_ROWS)[1][0]

    def loss(arrays: Sequence[object], batch: tuple[object, object]) -> tuple[object, object]:
        _Rows.given = arrays[0]
        value = model.compute_loss(y=batch[1], y_pred=model(batch[0], training=True))
        return value, value

    trained = model.trainable_variables
    step = backend.gradients(loss, model.variables, trained)

    def update(*gradients: object) -> None:
        model.optimizer.apply(list(gradients), trained)

    like = [np.asarray(backend.copied(variable)) for variable in trained]
    apply = backend.update(update, like, [*trained, *model.optimizer.variables])

    def steps() -> None:
        for _ in range(_STEPS):
            _, dense, _ = step([rows], (given, clicks), [])
            apply(*dense)

    return steps


class _Rows(keras.layers.Layer):  # type: ignore[misc]
    """Gives rows that are there already, whatever the ids are."""

    given: object = None

    def call(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        if isinstance(ids, keras.KerasTensor):
            return keras.KerasTensor((*ids.shape, DIM))
        return self.given

    def compute_output_spec(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor((*ids.shape, DIM))


if __name__ == "__main__":
    main()
