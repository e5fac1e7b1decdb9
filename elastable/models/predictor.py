"""`et.Predictor`: predictions of a trained model, each from one version of its rows and its dense part."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Array, Float32, Int64
from elastable.embedding_store.errors import (
    BadInput,
    ElastableError,
    ModelError,
    Unsupported,
)
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.master.model.dense import dense_part
from elastable.models.versions import (
    Saved,
    Versions,
    is_followed,
    latest_of,
    model_of_job,
    no_such_version,
    require_same_model,
    take_weights,
)
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.rows.model_inputs import inputs_of
from elastable.worker.step.forward import ArraySpec, require_like
from elastable.worker.step.id_set import make_id_sets
from elastable.worker.step.steps import make_infer_step, make_plan
from elastable.worker.user_model.build import as_tensors

UNKNOWN = ("initial", "zeros")
_LONGEST_REASON = 300  # characters of an error of a backend


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """A tensor that a model takes or gives.

    Attributes:
        dtype: As of Keras, such as "int64", "float32" or "string".
        shape: Without the records; None: any size.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class Predictor(Closing):
    """Predicts with a trained model, which needs no other process, and none of its data.

    Calls from several threads are answered one after another.

    Args:
        source: A run directory or a folder of checkpoints, a checkpoint, or the URL of a store that a job writes to
            (`redis://...`, `memory?log=/folder` of this machine, `grpc://host:port` of the job's master, or
            `servers:host:port,...` of its store servers): the version that it has now, and after each `advance` the
            newest one. A folder of `export --format serving` goes on to those of the store that it is of.
        version: The version to hold; None: none.
        checkpoints: Where other versions are read from (`hold`); None: from `source`, where that is no store.
        unknown: What ids without a row read, one of `UNKNOWN`: their initial value, as in training, or zeros.
        model_file: The job's model file, for models that are made of classes and functions of your own; None: the model
            is made of the configuration that the version names.
        deadline_s: Seconds that reading Redis may take; None: 10.

    Attributes:
        name: Of the model.
        inputs, outputs: What it takes and gives.
        held: The version that is held; None: none.

    Raises:
        BadInput, CheckpointError, ModelError, Unsupported: there is no such version, or it cannot be used here.
        Unavailable, StoreBroken: the store cannot be read.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        version: int | None = None,
        checkpoints: str | Path | None = None,
        unknown: str = "initial",
        model_file: str | Path | None = None,
        deadline_s: float | None = None,
    ) -> None:
        if unknown not in UNKNOWN:
            raise BadInput(f"unknown={unknown!r}: write one of {', '.join(map(repr, UNKNOWN))}")
        self._zeros = unknown == "zeros"
        self._checkpoints = source if checkpoints is None and not is_followed(source) else checkpoints
        self.held = version
        self._newest: Versions = latest_of(source, version, deadline_s)
        self._versions: Versions = self._newest
        with ExitStack() as undo:
            undo.callback(self.close)
            job = self._versions.job
            self._model = model_of_job(job, model_file)
            self._dense = dense_part(self._model, None)
            self.name = str(self._model.name)
            self.inputs, self._spec, self._packed = _inputs(self._model)
            self._plan = make_plan(self._model, self._spec, training=None)
            self._step = make_infer_step(
                self._model, self._spec, self._plan, lambda table, ids: self._lookup({table: ids})[table]
            )
            self._one, self._moving, self._version = threading.Lock(), threading.Lock(), -1
            self.outputs = _outputs(self._model)
            for each in (*self.inputs, *self.outputs):
                if each.dtype != "string" and np.dtype(each.dtype).kind not in "biuf":
                    raise Unsupported(
                        f"{each.name!r} of model {self.name!r}, {[None, *each.shape]}, is of {each.dtype}, which NumPy "
                        "has not: give the layer dtype='float32'"
                    )
            self._read(self._versions)
            if version is not None:
                self.hold(version)
            undo.pop_all()

    @property
    def version(self) -> int:
        """The version that the last prediction was of, or the next one is of."""
        return self._version

    @property
    def look_s(self) -> float | None:
        """Seconds between two calls of `advance` that find a version soon and cost little; None: there never is one."""
        return self._newest.look_s

    def advance(self) -> int:
        """Goes on to the newest version of the source, unless one is held; returns the version. Raises as the class."""
        with self._moving:
            if self.held is None:
                self._read_newest()
            return self._version

    def hold(self, version: int) -> None:
        """Answers from this version until `free`: the current one, or one that was saved.

        A saved version takes memory of its own, next to that of a store that is followed.

        Raises:
            CheckpointError: it cannot be read; says which ones can. What is answered from stays as it is.
            StoreBroken: it is of another model.
        """
        with self._moving:
            if version != self._version:
                if self._checkpoints is None:
                    raise no_such_version(version, self._version)
                saved = Saved(self._checkpoints, version)
                try:
                    require_same_model(saved.job, self._newest.job, self._checkpoints)
                    self._read(saved)
                except BaseException:
                    saved.close()
                    raise
            self.held = version

    def free(self) -> int:
        """Goes on to the newest version again, and returns it. Raises as the class; then the held one stays."""
        with self._moving:
            self._read_newest()
            self.held = None
            return self._version

    def _read_newest(self) -> None:
        newest = self._newest.advance()
        if newest is self._newest:
            self._read(newest)
            return
        try:
            self._read(newest)
        except BaseException:
            newest.close()
            raise
        self._newest.close()
        self._newest = newest

    def _read(self, versions: Versions) -> None:
        """Answers from these from now on."""
        with self._one:
            before, self._versions = self._versions, versions
            try:
                with self._at_version(fresh=before is not versions or self._version < 0):
                    pass
            except BaseException:
                self._versions = before
                raise
        if before not in (versions, self._newest):
            before.close()

    def newest(self) -> int:
        """The newest version that `advance` would go on to."""
        return self._newest.newest()

    def predict(self, x: Mapping[str, npt.ArrayLike]) -> tuple[dict[str, Array], int]:
        """The outputs for some records, by name, and the version that all of them are of.

        Args:
            x: Every input by name, `[records, ...]`.

        Raises:
            BadInput, BadIds, IdOutOfRange: a name, dtype, shape or value that the model does not take.
            ModelError: the model fails for another reason.
        """
        arrays = self.checked(x)
        records = len(next(iter(arrays.values())))
        batch = as_tensors((self._packed(arrays),), "the inputs", self._model)
        require_like(self._spec, batch, records, "the inputs")
        with self._one, self._at_version():
            ids = make_id_sets(self._plan.tables, self._plan.ids(batch), self._versions.rows.specs())
            rows = self._lookup(ids.unique)
            try:
                found = self._step(batch, rows, ids)
            except ElastableError:
                raise
            except Exception as error:
                raise self._failed(arrays, error) from error
            named = {each.name: np.asarray(value) for each, value in zip(self.outputs, found, strict=True)}
            for name, value in named.items():
                if value.ndim == 0 or len(value) != records:
                    raise ModelError(
                        f"output {name!r} is {list(value.shape)} for {records} records: it has none of each"
                    )
            return named, self._version

    def _lookup(self, ids: Mapping[str, Int64]) -> dict[str, Float32]:
        found = self._versions.rows.lookup(ids)
        for table, some in ids.items() if self._zeros else ():
            known = self._versions.rows.read_rows(table, some).ids
            found[table] = np.where(np.isin(some, known)[:, np.newaxis], found[table], np.float32(0))
        return found

    def _failed(self, arrays: Mapping[str, Array], error: Exception) -> ElastableError:
        """What a model raised, named: a value that one of its layers does not take, or a failure of its own."""
        bad = (ValueError, IndexError, *((tf.errors.InvalidArgumentError,) if backend().has_graphs else ()))
        given = ", ".join(f"{name!r} {list(array.shape)}" for name, array in arrays.items())
        reason = " ".join(str(error).split())[-_LONGEST_REASON:]  # the end says which value it was
        message = f"model {self.name!r} cannot compute inputs {given}: {type(error).__name__}: {reason}"
        return BadInput(message) if isinstance(error, bad) else ModelError(message)

    def checked(self, x: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """The inputs as arrays `[records, ...]`, as `predict` takes them; which values are ids is seen there.

        Raises:
            BadInput: a name, dtype or shape that the model does not take.
        """
        known = {each.name: each for each in self.inputs}
        if set(x) != set(known):
            raise BadInput(f"inputs {', '.join(sorted(x)) or 'none'}: the model takes {', '.join(known)}")
        arrays = {name: _as_array(each, x[name]) for name, each in known.items()}
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1 or not next(iter(sizes.values())):
            raise BadInput(f"inputs of {sizes} records: all need the same number, at least 1")
        return arrays

    def warm(self) -> bool:
        """Predicts for records of zeros and of ones, so that nothing is traced or compiled in the first request.

        Returns:
            Whether the outputs for one are the same with the other beside it, up to rounding; False also where that is
            not known, as these are no ids of the model.
        """
        shapes = {each.name: (2, *(size or 1 for size in each.shape)) for each in self.inputs}
        kinds = {each.name: object if each.dtype == "string" else each.dtype for each in self.inputs}
        x = {name: np.zeros(shape, kinds[name]) for name, shape in shapes.items()}
        for name, array in x.items():
            array[:] = np.array(["", "1"] if kinds[name] is object else [0, 1]).reshape(2, *[1] * (array.ndim - 1))
        with suppress(ElastableError):
            alone, _ = self.predict({name: array[:1] for name, array in x.items()})
            both, _ = self.predict(x)
            return all(np.allclose(both[name][:1], alone[name], 1e-3, 1e-5, equal_nan=True) for name in alone)
        return False

    def close(self) -> None:
        """Lets go of the rows. Closing twice is harmless."""
        self._versions.close()
        self._newest.close()

    @contextmanager
    def _at_version(self, fresh: bool = False) -> Iterator[None]:
        with self._versions.current(-1 if fresh else self._version) as (version, record):
            if record is not None:
                take_weights(self._model, self._dense, self._versions.rows, record)
            self._version = version
            yield


def _inputs(model: keras.Model) -> tuple[list[TensorSignature], BatchSpec, Callable[[Mapping[str, object]], object]]:
    """What a model takes, the spec of its batches (x,), and what makes x of arrays by name."""
    given = inputs_of(model)
    named = dict(given) if isinstance(given, Mapping) else {each.name: each for each in keras.tree.flatten(given)}
    kinds = [type(each) for each in named.values()]
    if given is None or any(kind is not keras.KerasTensor for kind in kinds):
        raise Unsupported(
            f"model {model.name!r} has no inputs with names and dtypes; make it of keras.Input (Functional, or "
            "Sequential with a keras.Input), with a flat dict or list of them"
        )
    if any(getattr(each, "ragged", False) or each.sparse for each in named.values()):
        raise Unsupported(f"model {model.name!r} has ragged or sparse inputs, which no protocol here carries; pad them")
    inputs = [TensorSignature(name, str(each.dtype), tuple(each.shape[1:])) for name, each in named.items()]

    def packed(arrays: Mapping[str, object]) -> object:
        if isinstance(given, Mapping):
            return dict(arrays)
        in_order = [arrays[each.name] for each in inputs]
        return in_order if isinstance(given, list | tuple) else in_order[0]

    if backend().has_graphs:
        specs = {each.name: tf.TensorSpec((None, *each.shape), each.dtype) for each in inputs}
    else:
        specs = {each.name: ArraySpec(np.dtype(each.dtype), (None, *each.shape)) for each in inputs}
    return inputs, (packed(specs),), packed


def _outputs(model: keras.Model) -> list[TensorSignature]:
    """Named as in a SavedModel: by the keys of a dict, or else by place where layers' names do not tell them apart."""
    made = keras.tree.flatten(model.outputs)
    names = list(model.output_names) if hasattr(model, "output_names") else []
    output = None if isinstance(model, keras.Sequential) else model.output  # of which Keras has it only within a model
    if isinstance(output, Mapping) and len(output) == len(made):
        places = keras.tree.pack_sequence_as(output, range(len(made)))
        names = sorted(places, key=places.get)
    if len({*names}) != len(made):
        names = [f"output_{place}" for place in range(len(made))]
    return [
        TensorSignature(str(name), str(each.dtype), tuple(each.shape[1:]))
        for name, each in zip(names, made, strict=True)
    ]


def _as_array(given: TensorSignature, value: npt.ArrayLike) -> Array:
    """Values of one input; a float input also takes integers. Raises `BadInput`."""
    try:
        array = np.asarray(value)
        if array.dtype.kind in "biuf" and "float" in given.dtype:
            array = array.astype(given.dtype, copy=False)
    except (ValueError, TypeError) as error:
        raise BadInput(f"input {given.name!r}: {error}") from error
    if array.ndim != 1 + len(given.shape) or any(
        size not in (None, found) for size, found in zip(given.shape, array.shape[1:], strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in ("records", *given.shape))
        raise BadInput(f"input {given.name!r} is {list(array.shape)}; it must be [{wanted}]")
    if array.dtype.kind not in ("SUO" if given.dtype == "string" else "b" if given.dtype == "bool" else "iuf"):
        raise BadInput(f"input {given.name!r} is of {array.dtype}; it takes {given.dtype}")
    return array
