"""`et.fit(on=...)`: the job of a fit on a cluster. A folder of files goes there, and a checkpoint comes back."""

import inspect
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.errors import BadInput, ModelError
from elastable.in_process.fit_data import BegunFit, FitArguments, FitData, fit_data
from elastable.jobs.engines.job_on_engine import run_on
from elastable.jobs.engines.ray_actors import is_local
from elastable.jobs.options import TrainOptions
from elastable.master.backend.contract import backend
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.storage.checkpoint_locations import newest_checkpoint
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.model.keras_optimizer import accumulation_of
from elastable.models.configuration import config_of, model_of, own_names
from elastable.output.progress_bars import JobConsole
from elastable.process.exit_codes import ExitCode, error_of
from elastable.worker.readers.batch.pytrees import as_arrays
from elastable.worker.readers.batch.ragged import RaggedArray
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader

_OF_CLUSTER = (
    "workers", "stores", "partition", "store", "worker_cpus", "worker_gpus", "memory", "checkpoint_dir",
    "checkpoint_every", "run_dir", "insecure", "deadline_s", "transport", "listen", "http", "lease_s", "backup_after_s",
)  # fmt: skip
_STAY_HERE = (
    "callbacks", "store", "locations", "continue_from", "steps_per_epoch", "initial_epoch", "evaluate_every",
    "validation_batch_size",
)  # fmt: skip
_OF_DATA = (
    "x", "y", "sample_weight", "class_weight", "validation_data", "validation_split", "validation_steps", "batch_size",
)  # fmt: skip
_MODEL_FILE = '''"""Written by et.fit(on=...)."""

from elastable.in_process.fit_elsewhere import CarriedFit

_fit = CarriedFit(__file__, {config!r}, {arguments!r}, {checkpoints!r})
model, data, callbacks = _fit.model, _fit.data, _fit.callbacks
'''


def fit_on(
    model: keras.Model,
    settings: FitArguments,
    on: str,
    cluster: Mapping[str, object],
    begin: Callable[[], BegunFit],
) -> keras.callbacks.History:
    """As `et.fit`, of `on` and `cluster`; `begin` builds the model, makes its tables and fills them."""
    _refuse(settings, on, cluster)
    fit = begin()
    config = config_of(model)
    if not config or (own := own_names(config)):
        what = f"{own[0]}, which is your own," if config else "what its Keras configuration does not hold,"
        raise ModelError(f"on={on!r}: model {model.name!r} is made of {what} and would be unknown there: {_write(on)}")
    with tempfile.TemporaryDirectory(prefix="elastable-fit-") as home:
        folder = Path(home) / "job"
        folder.mkdir()
        place = _absolute(f"{str(cluster.get('checkpoint_dir', home)).rstrip('/')}/fit-{fit.job.job}")
        said = _Said(folder, on)
        arguments = {name: said.of(getattr(settings, name), name) for name in _OF_DATA}
        file = folder / "model.py"
        file.write_text(_MODEL_FILE.format(config=config, arguments=json.dumps(arguments), checkpoints=place))
        options = _options(fit, settings, on, {**cluster, "checkpoint_dir": place}, file)
        write_checkpoint(place, fit.store, fit.dense.tensors(), fit.job, fit.start)
        code = run_on(options, JobConsole(quiet=settings.verbose == 0), {"KERAS_BACKEND": backend().name})
        if code not in (ExitCode.DONE, ExitCode.INTERRUPTED):
            raise error_of(code)(f"on={on!r}: the job ended with exit code {code}; its logs are in {options.run_dir}")
        history = _taken_back(model, fit, place)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return history


def _absolute(path: object) -> str:
    return str(path) if "://" in str(path) else os.path.abspath(str(path))


def _write(on: str) -> str:
    return f"write a model file, and run elastable train MODEL.py --on {on}"


def _refuse(settings: FitArguments, on: str, cluster: Mapping[str, object]) -> None:
    """Raises `BadInput` for what a job elsewhere cannot be given, by name."""
    for name in _STAY_HERE:
        if value := getattr(settings, name):
            shown = type(value[0]).__name__ if isinstance(value, tuple) else repr(value)
            raise BadInput(f"{name}={shown} with on={on!r} is not carried to another process: {_write(on)}")
    if settings.validation_freq != 1:
        raise BadInput(f"validation_freq={settings.validation_freq} with on={on!r}: a job evaluates after each epoch")
    if settings.lazy is None:
        raise BadInput(f"lazy=None with on={on!r}: say True or False")
    if settings.seed is None:
        raise BadInput(f"on={on!r} needs seed=: all that is random in several processes is drawn by one seed")
    for name in cluster:
        if name not in _OF_CLUSTER:
            raise BadInput(f"cluster={{{name!r}: ...}}: is none of {', '.join(_OF_CLUSTER)}")
    if "checkpoint_dir" not in cluster and not is_local(on):
        raise BadInput(
            f"on={on!r} needs cluster={{'checkpoint_dir': ...}}: a folder that all nodes and this process share, or a "
            "URL such as s3://bucket/folder: weights and rows go and come through it"
        )


def _options(fit: BegunFit, settings: FitArguments, on: str, cluster: Mapping[str, object], file: Path) -> TrainOptions:
    given: dict[str, Any] = {"run_dir": "runs", **cluster}
    given["run_dir"] = Path(given["run_dir"])
    if isinstance(stores := given.get("stores", ()), int | str):
        given["stores"] = tuple(str(stores).split(","))
    return TrainOptions(
        model_file=file,
        on=on,
        resume=True,  # from the checkpoint of its first version, and from a later one when it is started again
        resume_command="et.fit, which begins with these weights",
        export=False,
        epochs=fit.job.epochs,
        micro_batch_size=fit.job.micro_batch_size,
        grads_to_wait=settings.grads_to_wait or (None if accumulation_of(fit.parts.model.optimizer) else 1),
        average=settings.average,
        not_finite=settings.not_finite,
        seed=fit.job.seed,
        shuffle=settings.shuffle,
        lazy=bool(settings.lazy),
        offload_above=settings.offload_embeddings_above,
        **given,
    )


def _taken_back(model: keras.Model, fit: BegunFit, place: str) -> keras.callbacks.History:
    """Gives the model what the job has trained."""
    newest = newest_checkpoint(place)
    assert newest is not None  # the one that it began with
    saved = open_checkpoint(newest)
    fit.dense.restore(saved.dense())
    restore_tables(saved, fit.store)
    fit.parts.attach()
    history = CarriedHistory()
    history.set_model(model)
    history.load_state_dict(saved.progress().hooks.get("CarriedHistory", {"epoch": [], "history": {}}))
    history.evaluations = []  # none within an epoch
    model.history = history
    return history


class _Said:
    """Says arguments of a fit as JSON; arrays become files of a folder."""

    def __init__(self, folder: Path, on: str) -> None:
        self._folder, self._on, self._files = folder, on, 0

    def of(self, value: object, name: str) -> object:
        """Raises `BadInput` by `name` for what cannot be said."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, Mapping):
            return {"dict": [[self.of(key, name), self.of(each, f"{name}[{key!r}]")] for key, each in value.items()]}
        for kind in (tuple, list):
            if isinstance(value, kind):
                return {kind.__name__: [self.of(each, f"{name}[{place}]") for place, each in enumerate(value)]}
        return self._reader(value, name) if isinstance(value, Reader) else self._array(value, name)

    def _reader(self, reader: Reader, name: str) -> object:
        kind = type(reader)
        if not isinstance(reader, ParquetReader | CsvReader) or kind not in _FILES.values():
            raise self._unsaid(name, reader)
        given = dict(inspect.signature(kind).bind(*reader.made_with[0], **reader.made_with[1]).arguments)
        paths = given["paths"] if isinstance(given["paths"], list | tuple) else [given["paths"]]
        given["paths"] = list(map(_absolute, paths))
        said = {key: self.of(each, f"{name}: et.{kind.__name__}({key}=)") for key, each in given.items()}
        return {"reader": [kind.__name__, said]}

    def _array(self, value: object, name: str) -> object:
        try:
            leaf = as_arrays(value, name)
        except BadInput as error:
            raise self._unsaid(name, value) from error
        if isinstance(leaf, RaggedArray):
            return {"ragged": [self._array(leaf.values, name), self._array(leaf.splits, name)]}
        if not isinstance(leaf, np.ndarray) or leaf.dtype == object:
            raise self._unsaid(name, value)
        self._files += 1
        np.save(self._folder / f"{self._files}.npy", leaf, allow_pickle=False)
        return {"array": f"{self._files}.npy"}

    def _unsaid(self, name: str, value: object) -> BadInput:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        return BadInput(
            f"{name} is {kind}, which is not carried to another process with on={self._on!r}: give numbers in arrays, "
            f"et.ParquetReader or et.CsvReader with paths that all nodes can read; or {_write(self._on)}"
        )


# In the processes of the job


_FILES: dict[str, type[ParquetReader | CsvReader]] = {"ParquetReader": ParquetReader, "CsvReader": CsvReader}


def _made(said: Any, folder: Path) -> Any:
    """What `_Said.of` has said."""
    if not isinstance(said, dict):
        return said
    ((kind, value),) = said.items()
    if kind == "dict":
        return {_made(key, folder): _made(each, folder) for key, each in value}
    if kind in ("tuple", "list"):
        made = [_made(each, folder) for each in value]
        return made if kind == "list" else tuple(made)
    if kind == "reader":
        return _FILES[value[0]](**{name: _made(each, folder) for name, each in value[1].items()})
    if kind == "ragged":
        return RaggedArray(*(_made(each, folder) for each in value))
    return np.load(folder / value, mmap_mode="r", allow_pickle=False)


class CarriedHistory(keras.callbacks.History):  # type: ignore[misc]
    """Keras' `History`, which a job keeps with its versions."""

    def state_dict(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {"epoch": self.epoch, "history": {name: [*map(float, each)] for name, each in self.history.items()}}

    def load_state_dict(self, state: DocumentFields) -> None:
        """Goes on from `state_dict()`."""
        self.epoch, self.history = state["epoch"], state["history"]


class CarriedFit:
    """The model file of a fit.

    Args:
        file: Its path, next to the arrays.
        config: Of the model.
        arguments: JSON of `_Said`, of each of `_OF_DATA`.
        checkpoints: Where that of the first version is.
    """

    def __init__(self, file: str, config: str, arguments: str, checkpoints: str) -> None:
        self._folder, self._config, self._arguments, self._place = Path(file).parent, config, arguments, checkpoints

    def model(self) -> keras.Model:
        """With weights that the job's first version replaces."""
        return model_of(self._config)

    @cached_property
    def _data(self) -> FitData:
        given = json.loads(self._arguments)
        return fit_data(FitArguments(**{name: _made(said, self._folder) for name, said in given.items()}))

    def data(self, split: str) -> Reader | None:
        """As in the process of the fit."""
        return self._data.train if split == "train" else self._data.validation

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Of the master alone. Raises `BadInput` where it has not begun with the weights of the fit."""
        if newest_checkpoint(self._place) is None:
            raise BadInput(
                f"cluster={{'checkpoint_dir': ...}}: {self._place} is not seen here, where the master runs: give a "
                "folder that all nodes and the process of et.fit share, or a URL"
            )
        return [CarriedHistory()]
