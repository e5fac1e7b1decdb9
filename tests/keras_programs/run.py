"""Runs a drawn program on both sides, and says whether it came out the same, or was refused."""

import logging
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import keras
import numpy as np

from elastable.embedding_store.errors import ElastableError, JobFailed
from elastable.master.backend.lazy import tf
from tests.keras_programs.drawn import BATCH, DrawnProgram, Side
from tests.keras_table.case import Different, dense_gradients, difference
from tests.keras_table.weight_cases import Averaging, Best, Halving

__all__ = ["kind_of_refusal", "ran", "verdict"]

_NOT_LOADED = "objects could not be loaded. Example error message"


def verdict(program: DrawnProgram) -> str:
    """ "same", or the message of the refusal.

    Raises:
        Different: the two sides differ.
    """
    expected = _run(program, Side(stored=False))
    try:
        found = _run(program, Side(stored=True))
    except JobFailed as error:
        raise Different(f"not refused, but failed: {error}") from error
    except ElastableError as error:
        return str(error)
    except Exception as error:
        if _NOT_LOADED in str(error):  # Keras words what a layer or optimizer raises while it loads anew
            return str(error).split("\n\n")[1]
        raise Different(f"{type(error).__name__}: {error}") from error
    half = program.policy != "float32"
    unlike = difference(expected, found, *((0.05, 0.05) if half else (3e-4, 1e-4)))
    if unlike and half:
        # 16 bits round sums in another order; what is not rounding differs in 32 bits, too.
        program.policy = "float32"
        return verdict(program)
    if unlike and any(difference(expected, _rounded(program, change), 3e-4, 1e-4) for change in (1e-7, -1e-7)):
        raise _Unstable("plain Keras differs as much from itself, where its first weights differ by a rounding")
    if unlike:
        raise Different(unlike)
    return "same"


class _Unstable(Exception): ...


class _TensorFlowsOwn(Exception):
    """What a program uses is there on Keras' TensorFlow backend alone."""


def _rounded(program: DrawnProgram, change: float) -> dict[str, object]:
    """Of plain Keras, whose weights begin larger by `change` of themselves."""
    plain = program.model

    def model(side: Side) -> object:
        made = plain(side)
        for weight in made.trainable_variables:
            weight.assign(keras.ops.convert_to_numpy(weight) * np.float32(1.0 + change))
        return made

    with patch.object(program, "model", model):
        return _run(program, Side(stored=False))


def ran(seed: int) -> tuple[int, str, str]:
    """(seed, "same", "refused" or "different", what was said) of one program."""
    program = DrawnProgram(seed)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = verdict(program)
    except Different as difference:
        return seed, "different", f"{difference}\n    {program}"
    except Exception as error:  # noqa: BLE001 - plain Keras cannot run what was drawn
        return seed, "of no use", f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    return seed, "same" if said == "same" else "refused", said


def kind_of_refusal(message: str) -> str:
    """A refusal without the names and numbers of its program."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", re.sub(r"'[^']*'", "'...'", message)).split("\n")[0]


def _run(program: DrawnProgram, side: Side) -> dict[str, object]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(program.policy)
    try:
        with _reference() if not side.stored else nullcontext(), tempfile.TemporaryDirectory() as folder:
            return _USES[program.use](_Runner(program, side, folder))
    finally:
        keras.config.set_dtype_policy(before)


def _reference() -> AbstractContextManager[object]:
    """Plain Keras, with dense gradients of its tables: on TensorFlow it is asked for them."""
    return dense_gradients() if keras.config.backend() == "tensorflow" else nullcontext()


class _Runner:
    """Fits models of a program on one side."""

    def __init__(self, program: DrawnProgram, side: Side, folder: str) -> None:
        self.program, self.side, self.folder = program, side, folder
        self.history: list[dict[str, list[float]]] = []

    def model(self) -> keras.Model:
        return self.program.model(self.side)

    def fit(self, model: keras.Model) -> keras.Model:
        import elastable as et

        program = self.program
        options: dict[str, Any] = {"epochs": program.epochs, "shuffle": False, "verbose": 0}
        if program.weights is not None:
            options["sample_weight"] = program.weights
        if program.validation:
            options |= {"validation_data": (program.x, program.y), "validation_batch_size": BATCH}
        options["callbacks"] = _CALLBACKS[program.callback](self.folder)
        if self.side.stored:
            more: dict[str, Any] = {"lazy": program.lazy, "offload_embeddings_above": 1}
            if program.waits > 1:
                more["grads_to_wait"] = program.waits
            history = et.fit(model, program.x, program.y, batch_size=BATCH // program.waits, **options, **more)
        else:
            history = model.fit(program.x, program.y, batch_size=BATCH, **options)
        self.history.append(dict(history.history))
        return model

    def outcome(self, *models: keras.Model) -> dict[str, object]:
        x, y = self.program.x, self.program.y
        return {
            "history": list(self.history),
            "weights": [model.get_weights() for model in models],
            "predictions": [self._predicted(model) for model in models],
            "evaluation": [float(np.mean(models[0].evaluate(x, y, verbose=0))) if self._traces else 0.0],
        }

    def _predicted(self, model: keras.Model) -> object:
        if self._traces:
            return model.predict(self.program.x, verbose=0)
        return keras.ops.convert_to_numpy(model(self.program.x))

    @property
    def _traces(self) -> bool:
        return self.program.seed % 4 == 0  # a trace is dear


def _folds(runner: _Runner) -> dict[str, object]:
    model = runner.model()
    start = model.get_weights()
    runner.fit(model).set_weights(start)
    return runner.outcome(runner.fit(model))


def _copy(runner: _Runner) -> dict[str, object]:
    model, fresh = runner.fit(runner.model()), runner.model()
    fresh.set_weights(model.get_weights())
    return runner.outcome(runner.fit(fresh), model)


def _clone(runner: _Runner) -> dict[str, object]:
    model = runner.fit(runner.model())
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    runner.program.compiled(clone, runner.side)
    return runner.outcome(runner.fit(clone))


def _file(runner: _Runner) -> dict[str, object]:
    model = runner.fit(runner.model())
    model.save(f"{runner.folder}/model.keras")
    return runner.outcome(runner.fit(keras.models.load_model(f"{runner.folder}/model.keras")))


def _weights_file(runner: _Runner) -> dict[str, object]:
    model = runner.model()
    model.save_weights(f"{runner.folder}/start.weights.h5")
    runner.fit(model)
    model.load_weights(f"{runner.folder}/start.weights.h5")
    return runner.outcome(runner.fit(model))


def _polyak(runner: _Runner) -> dict[str, object]:
    model, target = runner.fit(runner.model()), runner.model()
    for slow, fast in zip(target.weights, model.weights, strict=True):
        slow.assign(0.7 * slow + 0.3 * fast)
    return runner.outcome(target, model)


def _frozen(runner: _Runner) -> dict[str, object]:
    model = runner.model()
    model.get_layer("table_0").trainable = False
    runner.program.compiled(model, runner.side)
    runner.fit(model)
    model.get_layer("table_0").trainable = True
    runner.program.compiled(model, runner.side)
    return runner.outcome(runner.fit(model))


def _checkpoint(runner: _Runner) -> dict[str, object]:
    if keras.config.backend() != "tensorflow":
        raise _TensorFlowsOwn("tf.train.Checkpoint")
    model = runner.fit(runner.model())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(f"{runner.folder}/kept")
    runner.fit(model)
    checkpoint.restore(path)
    return runner.outcome(runner.fit(model))


def _fitted_again(between: Callable[[_Runner, keras.Model], object]) -> Callable[[_Runner], dict[str, object]]:
    def use(runner: _Runner) -> dict[str, object]:
        model = runner.fit(runner.model())
        between(runner, model)
        return runner.outcome(runner.fit(model))

    return use


_USES: dict[str, Callable[[_Runner], dict[str, object]]] = {
    "nothing": lambda runner: runner.outcome(runner.fit(runner.model())),
    "folds": _folds,
    "copy": _copy,
    "clone": _clone,
    "file": _file,
    "weights_file": _weights_file,
    "polyak": _polyak,
    "frozen": _frozen,
    "checkpoint": _checkpoint,
    "halved": _fitted_again(lambda _, model: model.set_weights([weight * 0.5 for weight in model.get_weights()])),
    "again": _fitted_again(lambda runner, model: runner.program.compiled(model, runner.side)),
}


class _LoadsBest(keras.callbacks.ModelCheckpoint):
    def on_train_end(self, logs: object = None) -> None:
        super().on_train_end(logs)
        self.model.load_weights(self.filepath)


_CALLBACKS: dict[str, Callable[[str], list[keras.callbacks.Callback]]] = {
    "none": lambda folder: [],
    "schedule": lambda folder: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5**epoch)],
    "best": lambda folder: [Best()],
    "averages": lambda folder: [Averaging()],
    "plateau": lambda folder: [keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10)],
    "stop": lambda folder: [keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)],
    "halving": lambda folder: [Halving()],
    "best_weights": lambda folder: [
        _LoadsBest(f"{folder}/best.weights.h5", "loss", save_best_only=True, save_weights_only=True)
    ],
}
