"""`et.fit` on Keras' backend, against plain Keras and against the dense part alone, on the same backend.

The click model with a table of 100,000 rows, or of 5 million, uniform ids, batches of 2,048; on JAX and PyTorch also
with a table for each of 26 features. All contenders are in this process, and take turns of an epoch.

    KERAS_BACKEND=jax python -m benchmarks.jobs.backends

With `--profile`: where the milliseconds of a step of `et.fit` go, beside those of the dense step alone.
"""

import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TypeAlias

import keras
import numpy as np

import elastable as et
from benchmarks.click_job.draws import batches
from benchmarks.click_job.model import click_model
from benchmarks.click_job.sizes import BATCH, DIM, FEATURES
from benchmarks.harness import Row, compare, interleaved, publish, rate
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.tables.grouping import sum_by_position
from elastable.master.backend.contract import array_backend
from elastable.master.commits.row_gradients import RowGradients
from elastable.master.core.driver import Driver
from elastable.master.core.job_master import Master
from elastable.master.model.dense import DenseState
from elastable.worker.runtime.work_here import WorkHere
from elastable.worker.step.array_step import ArrayTrainStep
from elastable.worker.step.train_step import TrainStep

_ROWS, _MANY = 100_000, 5_000_000
_STEPS, _ROUNDS = 24, 7
_OPTIMIZERS = {"tensorflow": ("SGD", "Adagrad", "Adam"), "jax": ("SGD", "Adam"), "torch": ("SGD", "Adam")}
_PAIRS = {
    "ours": ("26 tables of 100,000 rows", et.Embedding, FEATURES, _ROWS),
    "plain": ("", keras.layers.Embedding, FEATURES, _ROWS),
    "small": ("one table of 100,000 rows", et.Embedding, 1, _ROWS),
    "large": ("one table of 5 million rows", et.Embedding, 1, _MANY),
    "plain small": ("", keras.layers.Embedding, 1, _ROWS),
    "plain large": ("", keras.layers.Embedding, 1, _MANY),
}
"""Contender -> what it is, its layer, tables and rows of each."""

Compared: TypeAlias = dict[tuple[str, str], dict[str, float | None]]

_TENSORFLOW: Compared = {
    ("small", "dense"): {"SGD": 0.75, "Adagrad": None, "Adam": None},
    ("large", "dense"): {"SGD": None, "Adagrad": 0.65, "Adam": 0.65},
    ("small", "plain small"): {"SGD": 1.0, "Adagrad": 1.3, "Adam": 1.2},
    ("large", "plain large"): {"Adam": 15.0},
    ("large", "small"): {"SGD": 0.85, "Adagrad": 0.85, "Adam": 0.85},
}
"""(ours, theirs) -> optimizer -> floor."""


def _of_arrays(sgd: float, adam: float) -> Compared:
    return {
        ("ours", "plain"): {"SGD": sgd, "Adam": adam},
        ("ours", "dense"): {"SGD": None, "Adam": None},
        ("small", "dense"): {"SGD": 0.75, "Adam": None},
        ("large", "small"): {"SGD": None, "Adam": 0.85},
    }


_PARTS = {
    "all of it": (Driver.run,),
    "  the worker's part": (WorkHere.__call__,),
    "    lookup": (MemoryStore.lookup,),
    "    gather, dense step, sums": (TrainStep.__call__, ArrayTrainStep.__call__),
    "      sums by id": (sum_by_position,),
    "    report, finite check": (Master.report_gradient_later,),
    "  dense optimizer": (DenseState.apply,),
    "  commit of rows": (RowGradients.commit,),
}
"""Part of a step -> the functions that it is spent in; indented: a part of the one above."""

_COMPARED = {"tensorflow": _TENSORFLOW, "jax": _of_arrays(4.0, 8.0), "torch": _of_arrays(4.0, 15.0)}


def main() -> None:
    """Prints the figures, and writes `results/backends_NAME.json`."""
    name = keras.config.backend()
    if sys.argv[1:] == ["--profile"]:
        for optimizer in _OPTIMIZERS[name]:
            _profile(name, optimizer)
        return
    rows = [row for optimizer in _OPTIMIZERS[name] for row in _against(name, optimizer)]
    publish(f"backends_{name}", f"et.fit on Keras' {name} backend", rows)


def _against(name: str, optimizer: str) -> list[Row]:
    pairs = {pair: of[optimizer] for pair, of in _COMPARED[name].items() if optimizer in of}
    named = {each for pair in pairs for each in pair} - {"dense"}
    works = {each: _fits(optimizer, *_PAIRS[each][1:]) for each in _PAIRS if each in named}
    works["dense"] = _dense(name, optimizer)
    for work in works.values():
        work()  # compiles
    paces = interleaved({key: rate(work, _STEPS * BATCH, 1.0) for key, work in works.items()}, _ROUNDS)
    beside = {"dense": "the dense step alone", "small": "100,000"}
    return [
        compare(
            f"{name}, {optimizer}, {_PAIRS[ours][0]}, against {beside.get(theirs, 'plain Keras')}",
            "examples/s", paces[ours], paces[theirs], floor,
        )
        for (ours, theirs), floor in pairs.items()
    ]  # fmt: skip


def _profile(name: str, optimizer: str) -> None:
    """Prints milliseconds a step of the thread that computes and commits; a profile of Python's adds a tenth or so."""
    fit, alone = _fits(optimizer, *_PAIRS["small"][1:]), _dense(name, optimizer)
    paces = interleaved({"fit": rate(fit, _STEPS, 1.0), "alone": rate(alone, _STEPS, 1.0)}, _ROUNDS)
    profile = cProfile.Profile(time.perf_counter)
    profile.runcall(lambda: [fit() for _ in range(_ROUNDS)])
    spent = {key: of[3] for key, of in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    print(f"{name}, {optimizer}, {_ROWS} rows: {1000 / median(paces['fit']):.2f} ms a step, unprofiled; ", end="")
    print(f"the dense step alone {1000 / median(paces['alone']):.2f}. Profiled:")
    for part, functions in _PARTS.items():
        codes = [function.__code__ for function in functions]
        seconds = sum(spent.get((code.co_filename, code.co_firstlineno, code.co_name), 0.0) for code in codes)
        print(f"  {part:30} {1000 * seconds / _STEPS / _ROUNDS:6.2f}")


def _dense(name: str, optimizer: str) -> Callable[[], object]:
    return _tensorflow_steps(optimizer) if name == "tensorflow" else _dense_steps(optimizer)


def _tensorflow_steps(optimizer: str) -> Callable[[], object]:
    from benchmarks.click_job.dense_step import dense_steps

    return partial(dense_steps(optimizer), _STEPS)


def _fits(optimizer: str, layer: type[keras.Layer], tables: int, rows: int) -> Callable[[], object]:
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
