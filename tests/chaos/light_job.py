"""The model file of most schedules: the same job in NumPy, so that a process is at work in a fraction of a second."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master.api import DenseSnapshot, JobSpec, Task, TaskKind, Tensor
from elastable.master.commits.dense_part import DensePart, OptimizerStep
from elastable.master.push_check import TensorSpec
from tests.chaos.records import ACCUMULATOR, BETA_1, MOMENTUM, RATE, RHO, records_of

if TYPE_CHECKING:
    from elastable.embedding_store.contract.row_source import RowSource
    from elastable.embedding_store.contract.store import EmbeddingStore
    from elastable.jobs.options import JobOptions
    from elastable.worker.readers.batch.reader import Reader
    from elastable.worker.runtime.compute import Prepared
    from elastable.worker.step.trainable import StepResult
    from elastable.worker.user_model.model_file import ModelFile

_USER, _WORDS = 4, 3
_DROPPED = 0.2
_TABLES = ("counted", "users", "words_said")
_METRICS = ("loss", "error")


def data(split: str) -> tuple[dict[str, object], object]:
    return records_of(split)


def model() -> SimpleNamespace:
    """A stand-in for a Keras model, with the attributes that a job reads."""
    return SimpleNamespace(
        compute_loss=None,
        stop_training=False,
        optimizer=SimpleNamespace(use_ema=False),
        compiled=False,
        _flatten_layers=lambda **how: [],
    )


def _tables(seed: int, lazy: bool) -> dict[str, TableSpec]:
    name, given = {
        "sgd": ("sgd", {}),
        "adagrad": ("adagrad", {"initial_accumulator_value": ACCUMULATOR}),
        "adam": ("adam", {"beta_1": BETA_1}),
        "adamw": ("adamw", {"beta_1": BETA_1}),
        "momentum": ("sgd", {"momentum": MOMENTUM}),
        "rmsprop": ("rmsprop", {"rho": RHO}),
    }[os.environ["CHAOS_OPTIMIZER"]]
    optimizer = OptimizerSpec.of(name, lazy=lazy, learning_rate=RATE, **given)
    specs = (
        TableSpec("counted", 1, None, initializer=InitializerSpec("zeros"), seed=seed, optimizer=optimizer),
        TableSpec("users", _USER, 40, seed=seed, optimizer=optimizer),
        TableSpec("words_said", _WORDS, None, seed=seed, optimizer=optimizer),
    )
    return {spec.name: spec for spec in specs}


class _Dense(DensePart):
    """Variables with momentum, a state, and a rate that falls with the steps."""

    def __init__(self) -> None:
        width = _USER + _WORDS
        self.variables = (TensorSpec("weights", (width,), np.dtype(np.float32)),)
        self.states = (TensorSpec("seen", (width,), np.dtype(np.float32)),)
        self._tensors: dict[str, Tensor] = {
            "variables/00000": np.linspace(-1, 1, width).astype(np.float32),
            "states/00000": np.zeros(width, np.float32),
            "optimizer/00000": np.array(0, np.int64),
            "optimizer/00001": np.zeros(width, np.float32),
        }

    def step(self) -> int:
        return int(self._tensors["optimizer/00000"])

    def steps(self) -> tuple[OptimizerStep, ...]:
        # A constant rate, as rows that count must move by the same each time.
        return (OptimizerStep(self.step(), RATE),)

    def finalize_averages(self) -> None: ...  # the optimizer keeps none

    def snapshot(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> DenseSnapshot:
        return DenseSnapshot(
            version, (self._tensors["variables/00000"],), (self._tensors["states/00000"],), ("weights",), ("seen",)
        )

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        step, before = self.step(), self._tensors["optimizer/00001"]
        rate = np.float32(RATE * 0.99**step * rate_share)
        moved = np.float32(MOMENTUM) * before - rate * gradients[0]
        self._tensors = {
            "variables/00000": self._tensors["variables/00000"] + moved,
            "states/00000": states[0].copy(),
            "optimizer/00000": np.array(step + 1, np.int64),
            "optimizer/00001": moved,
        }

    def skip(self) -> None:
        self._tensors = {**self._tensors, "optimizer/00000": np.array(self.step() + 1, np.int64)}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if not self._tensors.keys() <= tensors.keys():
            raise CheckpointError(f"the checkpoint holds {sorted(tensors)}, not {sorted(self._tensors)}")
        self._tensors = {key: np.array(tensors[key]) for key in self._tensors}


class _Freezing:
    """Nothing is frozen; keeps what is used of `elastable.callbacks.freezing.Freezing`."""

    def __init__(self, *given: object) -> None: ...

    def begin(self, state: str = "") -> None: ...

    def state(self) -> str:
        return ""

    def look(self) -> None: ...


class _Metrics:
    """Sums and a count; keeps what is used of `elastable.master.model.model_metrics.ModelMetrics`."""

    def __init__(self, model: object = None) -> None:
        self.specs = tuple(TensorSpec(name, (), np.dtype(np.float32)) for name in (*_METRICS, "records"))

    def results(self, total: tuple[Tensor, ...], prefix: str = "") -> dict[str, float]:
        if not total:
            return {}
        return {prefix + name: float(total[place] / total[-1]) for place, name in enumerate(_METRICS)}


class Computer:
    """Gradients of a product of looked-up rows with the dense variables.

    Keeps `elastable.worker.runtime.compute.MicroBatchComputer`.
    """

    def __init__(self, job: JobSpec, readers: Mapping[TaskKind, Reader], specs: Mapping[str, TableSpec]) -> None:
        self._job, self._readers, self._specs = job, readers, specs
        self._snapshot: DenseSnapshot | None = None

    def prepare(self, task: Task) -> Prepared:
        from elastable.master.tasks.record_order import record_order
        from elastable.worker.runtime.compute import Prepared
        from elastable.worker.step.id_set import make_id_sets

        time.sleep(float(os.environ["CHAOS_PAUSE"]))
        reader = self._readers[task.kind]
        shuffled = self._job.shuffle and task.kind == "train"
        order = record_order(len(reader), task.epoch, self._job.seed, shuffled, reader.shuffle_block)
        batch = reader.take(order.take(task.start, task.stop))
        calls = [np.ascontiguousarray(batch[0][name]).reshape(-1) for name in ("own", "user", "words")]
        ids = make_id_sets(list(_TABLES), calls, self._specs)
        return Prepared(task, batch, ids, task.stop - task.start)

    def hold(self, snapshot: DenseSnapshot) -> None:
        self._snapshot = snapshot

    def train(self, prepared: Prepared, bets: Mapping[str, Float32]) -> StepResult:
        from elastable.worker.step.trainable import StepResult

        assert self._snapshot is not None
        count = np.float32(prepared.records)
        chance = np.random.default_rng((self._job.seed, prepared.task.micro_batch))
        kept = (chance.random((prepared.records, _USER + _WORDS)) >= _DROPPED).astype(np.float32)
        features, loss, away = self._forward(prepared, bets, kept)
        weights = self._snapshot.variables[0]
        moved = (2 * away / count)[:, None]
        by_feature = moved * weights * kept
        words = np.repeat(by_feature[:, _USER:] / np.float32(3), 3, axis=0)
        gradients = (np.full((prepared.records, 1), 1 / count, np.float32), by_feature[:, :_USER], words)
        slices = {
            table: Slices(prepared.ids.unique[table][inverse], np.ascontiguousarray(values, np.float32))
            for table, inverse, values in zip(_TABLES, prepared.ids.inverses, gradients, strict=True)
        }
        seen = np.float32(0.9) * self._snapshot.states[0] + np.float32(0.1) * features.mean(axis=0, dtype=np.float32)
        dense = (moved * features).sum(axis=0, dtype=np.float32)
        return StepResult(float(loss.sum()), (dense,), slices, (seen,), self._counts(loss, away))

    def evaluate(self, prepared: Prepared, bets: Mapping[str, Float32]) -> tuple[Tensor, ...]:
        _, loss, away = self._forward(prepared, bets, np.float32(1))
        return self._counts(loss, away)

    def _forward(
        self, prepared: Prepared, bets: Mapping[str, Float32], kept: Float32 | np.float32
    ) -> tuple[Float32, Float32, Float32]:
        assert self._snapshot is not None
        inverses = zip(_TABLES, prepared.ids.inverses, strict=True)
        own, user, words = (bets[table][inverse] for table, inverse in inverses)
        said = words.reshape(prepared.records, 3, _WORDS).mean(axis=1, dtype=np.float32)
        features = np.concatenate((user, said), axis=1) * kept
        labels: Float32 = np.asarray(prepared.batch[1])
        away = (features * self._snapshot.variables[0]).sum(axis=1, dtype=np.float32) - labels[:, 0]
        return features, away * away + own[:, 0], away

    @staticmethod
    def _counts(loss: Float32, away: Float32) -> tuple[Tensor, ...]:
        return tuple(np.array(value, np.float32) for value in (loss.sum(), np.abs(away).sum(), len(away)))


class _Parts:
    """In the place of `elastable.assembly.Assembly`: the tables and the dense part of this model."""

    steps, optimizers, on_worker = None, dict[str, object](), ()

    def __init__(self, model: object, tables: dict[str, TableSpec]) -> None:
        self.model, self.tables = model, tables

    def place(self, places: object) -> None:
        """No table stays on the workers."""

    def fill(self, store: EmbeddingStore, version: int) -> None:
        for spec in self.tables.values():
            store.create_table(spec)
        if store.version() != version:
            store.reset_version(version)

    def attach(self, store: EmbeddingStore) -> None:
        """No layer reads from it."""

    def dense(self) -> _Dense:
        return _Dense()


def use_light_model() -> None:
    """Makes this process build this model where the product builds one of Keras."""
    import elastable.callbacks.callback_list as callback_list
    import elastable.jobs.prepare as prepare
    import elastable.jobs.worker_process as worker_process

    def parts(file: ModelFile, options: JobOptions) -> tuple[object, _Parts]:
        return file.reader("train"), _Parts(file.model(), _tables(options.seed, options.lazy))

    def computer(
        job: JobSpec, file: object, readers: Mapping[TaskKind, Reader], source: RowSource, deadline_s: float
    ) -> Computer:
        return Computer(job, readers, source.specs())

    for name, stand_in in (
        ("_parts", parts),
        ("ModelMetrics", _Metrics),
        ("store_layers", lambda model: []),
    ):
        assert hasattr(prepare, name), f"elastable.jobs.prepare has no {name} any more"
        setattr(prepare, name, stand_in)
    assert hasattr(callback_list, "Freezing")
    callback_list.Freezing = _Freezing
    assert hasattr(worker_process, "_computer")
    worker_process._computer = computer  # type: ignore[assignment]
