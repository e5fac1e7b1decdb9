"""A case, the two ways its program is run (plain Keras; its tables in a store), and the verdict that this gives."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import keras
import numpy as np
from keras.src.utils.naming import reset_uids

import elastable as et
from elastable.embedding_store.errors import ElastableError, JobFailed
from elastable.master.backend.lazy import tf
from tests.untyped import Keyword

RECORDS, BATCH, LENGTH, DIM = 24, 8, 3, 4


class Outcome(TypedDict):
    """What a program came to: its weights by layer, and the history by name."""

    weights: dict[str, list[np.ndarray]]
    history: dict[str, list[float] | list[np.ndarray]]


@dataclass(frozen=True)
class Side:
    """How a program is run. Programs are written once, and take a side.

    Attributes:
        stored: Whether tables live in a store: `keras.layers.Embedding` layers are offloaded by `et.fit`.
        lazy: As `et.fit` takes it.
        dense: Plain Keras with dense gradients of its tables, for what it cannot do with sparse ones.
        every_row: Whether each batch touches every row of the table; otherwise it leaves a fifth of them.
    """

    stored: bool = False
    lazy: bool = True
    dense: bool = False
    every_row: bool = False

    @property
    def vocabulary(self) -> int:
        """Rows of the table. A batch has 24 ids, each once: Keras squares repeated ids one by one (docs/fit.md)."""
        return BATCH * LENGTH if self.every_row else 30

    @property
    def x(self) -> np.ndarray:
        """int64 [24, 3]."""
        random = np.random.default_rng(0)
        batches = [random.permutation(self.vocabulary)[: BATCH * LENGTH] for _ in range(RECORDS // BATCH)]
        return np.concatenate(batches).reshape(RECORDS, LENGTH)

    @property
    def y(self) -> np.ndarray:
        """float32 [24, 1]."""
        return np.random.default_rng(1).normal(size=(RECORDS, 1)).astype(np.float32)

    @property
    def labels(self) -> np.ndarray:
        """float32 [24, 1] of 0 and 1."""
        return (self.y > 0).astype(np.float32)

    @property
    def weights(self) -> np.ndarray:
        """float32 [24]: a weight of each record."""
        return np.random.default_rng(2).uniform(0.5, 2.0, RECORDS).astype(np.float32)

    def embedding(self, *arguments: Any, **options: Keyword) -> keras.layers.Layer:
        """`keras.layers.Embedding`, or `et.Embedding` with the same arguments."""
        return (et.Embedding if self.stored else keras.layers.Embedding)(*arguments, **options)

    def fit(self, model: keras.Model, *data: Any, **options: Keyword) -> keras.callbacks.History:
        """`model.fit`, or `et.fit` with the same arguments; with `grads_to_wait` in as many micro-batches a batch."""
        options = {"shuffle": False, "verbose": 0, **options}
        if "batch_size" not in options and (not data or isinstance(data[0], np.ndarray | dict | tuple | list)):
            options["batch_size"] = BATCH
        together = options.pop("grads_to_wait", 1)
        if not self.stored:
            return model.fit(*data, **options)
        if together > 1:
            options.update(grads_to_wait=together, batch_size=options["batch_size"] // together)
        return et.fit(model, *data, **options, lazy=self.lazy, offload_embeddings_above=1)


class MeanError:
    """A `compute_loss` that has no `self.losses` in it."""

    def compute_loss(
        self, x: object, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: object = None, training: bool = True
    ) -> tf.Tensor:
        return keras.ops.mean(keras.ops.abs(y - y_pred))


class OwnLoss(MeanError, keras.Model):
    """For functional models alone: Keras changes the bases of their class."""


def small(side: Side, units: int = 1, activation: str | None = None, **embedding: Keyword) -> keras.Model:
    """ids [3] -> an embedding -> a dense layer."""
    table = keras.layers.Embedding(side.vocabulary, DIM, name="items", **embedding)
    return around(table, keras.layers.Flatten(), keras.layers.Dense(units, activation, name="out"))


def around(*layers: keras.layers.Layer, dtype: str = "int64", kind: type[keras.Model] = keras.Model) -> keras.Model:
    ids = keras.Input((LENGTH,), dtype=dtype, name="ids")
    return kind(ids, functools.reduce(lambda value, layer: layer(value), layers, ids))


def flat(side: Side, *layers: keras.layers.Layer) -> keras.Model:
    """ids [3] -> a plain embedding -> the layers -> a dense layer of one unit."""
    table = keras.layers.Embedding(side.vocabulary, DIM, name="items")
    return around(table, keras.layers.Flatten(), *layers, keras.layers.Dense(1, name="out"))


def trained(
    side: Side,
    model: keras.Model | None = None,
    x: object = None,
    y: object = None,
    fit: Any = None,
    **compiled: object,
) -> Outcome:
    """Compiles with `compiled`, trains with `fit`, and gives what came out."""
    model = small(side) if model is None else model
    options = {"optimizer": keras.optimizers.SGD(0.5), "loss": "mse", "run_eagerly": True, **compiled}
    model.compile(**options)
    history = side.fit(model, side.x if x is None else x, side.y if y is None else y, **(fit or {}))
    return outcome(model, history)


def outcome(model: keras.Model, history: keras.callbacks.History | None = None) -> Outcome:
    weights = {}
    for layer in model._flatten_layers(include_self=False, recursive=True):
        variables = [np.asarray(variable) for variable in layer._trainable_variables + layer._non_trainable_variables]
        if hasattr(layer, "table_spec") and not layer.on_worker:
            variables.insert(0, layer.read_rows(np.arange(layer.input_dim)))
        if variables:
            weights[layer.name] = variables
    return {"weights": weights, "history": {} if history is None else dict(history.history)}


SAME_NUMBERS = "same numbers"
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: What a program says, as it says it.
        program: Run once with each side; what it returns (nested dicts, lists, arrays, strings) is compared.
        covers: The arguments and names of Keras that it stands for, as `tests/keras_table/keras_names.py` lists them,
            with spaces between.
        meaning: Where numbers cannot be compared: what is the same, and what is not.
        repeats: Whether ids repeat in a batch and are squared or clipped: Keras with dense gradients is the reference,
            as on JAX and PyTorch, and plain Keras on TensorFlow has other numbers.
        only: The backends, with spaces between, on which plain Keras can run it; "": on all. Elsewhere it is skipped.
        on_jax: How much numbers may differ on JAX.
    """

    name: str
    program: Callable[[Side], object]
    covers: str = ""
    meaning: str = ""
    repeats: bool = False
    only: str = ""
    on_jax: float = _TOLERANCE


def code_in(name: str) -> str:
    """What a row's name says as code, between backticks; several pieces are arguments, one after the other."""
    return ", ".join(re.findall(r"`([^`]+)`", name))


def arguments_in(code: str, *namespaces: Mapping[str, object]) -> dict[str, Any]:
    """Keyword arguments, evaluated as they are said; the names of later namespaces come first."""
    known: dict[str, object] = {}
    for names in namespaces:
        known |= names
    made: dict[str, Any] = eval(f"dict({code})", known)
    return made


class Different(AssertionError):
    """The store's side came out differently, and said nothing."""


def verdict(case: Case) -> str:
    """The text of the second column of the table.

    Raises:
        Different: the two sides differ.
    """
    if case.only and keras.config.backend() not in case.only.split():
        return f"skipped: only on {case.only}"
    if case.repeats:
        return _as_elsewhere(case)
    try:
        expected, dense = _run(case, Side()), ""
    except TypeError as error:
        if "IndexedSlices" not in str(error):
            raise
        with dense_gradients():
            expected = _run(case, Side(dense=True))
        dense = "; plain Keras needs dense gradients for it"
    try:
        found = _run(case, Side(stored=True))
    except JobFailed as error:
        raise Different(f"{case.name}: not refused, but failed: {error}") from error
    except ElastableError as error:
        return f"refused: {_shown(error)}"
    same = f"same meaning: {case.meaning}" if case.meaning else SAME_NUMBERS
    tolerance = case.on_jax if keras.config.backend() == "jax" else _TOLERANCE
    unlike = difference(expected, found, tolerance, tolerance)
    if not unlike:
        return same + dense
    if case.meaning:
        raise Different(f"{case.name}: {unlike}")
    return _without_laziness(case, expected, unlike)


def _as_elsewhere(case: Case) -> str:
    """For ids that repeat in a batch."""
    found = _run(case, Side(stored=True))
    if keras.config.backend() != "tensorflow":
        if unlike := difference(_run(case, Side()), found):
            raise Different(f"{case.name}: {unlike}")
        return SAME_NUMBERS
    if not difference(_run(case, Side()), found):
        raise Different(f"{case.name}: plain Keras on TensorFlow has the same numbers by now; say so in docs/fit.md")
    with dense_gradients():
        expected = _run(case, Side(dense=True))
    if unlike := difference(expected, found):
        raise Different(f"{case.name}: {unlike}")
    return "the numbers of Keras on JAX and PyTorch, [not those on TensorFlow](fit.md#ids-that-repeat-in-a-batch)"


@contextmanager
def dense_gradients() -> Iterator[None]:
    """Plain Keras' embedding as a product with one-hot rows: gradients are dense, and those of an id are summed."""
    plain = keras.layers.Embedding.call

    def call(self: keras.layers.Layer, inputs: keras.KerasTensor) -> keras.KerasTensor:
        ids = keras.ops.one_hot(keras.ops.cast(inputs, "int32"), self.input_dim, dtype=self.compute_dtype)
        return keras.ops.matmul(ids, keras.ops.cast(self.embeddings, self.compute_dtype))

    keras.layers.Embedding.call = call
    try:
        yield
    finally:
        keras.layers.Embedding.call = plain


def _without_laziness(case: Case, expected: object, lazily: str) -> str:
    """For optimizers that move rows which a batch does not touch."""
    try:
        unlike = difference(expected, _run(case, Side(stored=True, lazy=False)))
    except ElastableError as error:
        every_row = difference(_run(case, Side(every_row=True)), _run(case, Side(stored=True, every_row=True)))
        if every_row:
            raise Different(f"{case.name}: {every_row}") from error
        return f"{SAME_NUMBERS} on the rows that a batch touches; `lazy=False` is refused: {_shown(error)}"
    if unlike:
        raise Different(f"{case.name}: {lazily}; with lazy=False: {unlike}")
    return f"{SAME_NUMBERS} with `lazy=False`; else on the rows that a batch touches"


def _run(case: Case, side: Side) -> object:
    reset_uids()
    keras.utils.set_random_seed(3)
    before = keras.config.dtype_policy()
    try:
        return case.program(side)
    finally:
        keras.config.set_dtype_policy(before)


def _shown(error: ElastableError) -> str:
    """Its message, on one line, without what differs from run to run."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", str(error))
    text = re.sub(r" \(\w+\.py:\d+\)", "", text)  # where the program says it
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def difference(expected: object, found: object, rtol: float = _TOLERANCE, atol: float = _TOLERANCE) -> str:
    """Where the two differ first; empty: nowhere."""
    one, other = dict(_leaves(expected)), dict(_leaves(found))
    if one.keys() != other.keys():
        return f"plain Keras alone has {sorted(one.keys() - other.keys())}, ours {sorted(other.keys() - one.keys())}"
    for path, value in one.items():
        mine = other[path]
        if isinstance(value, str) or isinstance(mine, str):
            if value != mine:
                return f"{path} is {mine!r}, with plain Keras {value!r}"
            continue
        value, mine = np.asarray(value, np.float64), np.asarray(mine, np.float64)
        if value.shape != mine.shape:
            return f"{path} has the shape {mine.shape}, with plain Keras {value.shape}"
        if not np.allclose(mine, value, rtol=rtol, atol=atol, equal_nan=True):
            largest = np.nanmax(np.abs(mine - value))
            return f"{path} differs by {largest:.2e}: {value.reshape(-1)[:6]}, ours {mine.reshape(-1)[:6]}"
    return ""


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}/{key}")
    elif isinstance(value, list | tuple) and not all(isinstance(part, float | int) for part in value):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}/{number}")
    else:
        yield path, value
