"""The model file: what a user's Python file defines for a job."""

import hashlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import keras

from elastable.embedding_store.errors import BadInput, ElastableError, ModelError
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.numpy_reader import as_reader

SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A loaded model file, which defines `model()`, `data(split)` and optionally `callbacks()`, as the methods say.

    Attributes:
        path: Absolute path.
        sha256: Hash of its bytes, to check that all processes run the same file.
    """

    path: Path
    sha256: str
    _module: ModuleType

    def model(self) -> keras.Model:
        """The compiled Keras model.

        Raises:
            ModelError: `model()` raised, or returned something else.
        """
        model = self._call("model")
        if not hasattr(model, "compute_loss"):
            raise ModelError(f"{self.path}: model() returned a {type(model).__name__}; return a compiled keras.Model")
        return model

    def reader(self, split: str) -> Reader | None:
        """The records of a split, "train" or "validation", or None if the file has none; a Reader, or what makes one.

        Raises:
            ModelError: `data()` raised, or the file defines none.
            BadInput: data that is empty or of an unsupported type.
        """
        if split not in SPLITS:
            raise ModelError(f"split {split!r}: known splits are {', '.join(SPLITS)}")
        if not callable(getattr(self._module, "data", None)):
            raise ModelError(f"{self.path}: defines no data(); split {split!r} is read here: define data(split)")
        records = self._call("data", split)
        try:
            return None if records is None else as_reader(records, endless=split == "train")
        except BadInput as error:
            raise type(error)(f"{self.path}: data({split!r}): {error}") from error

    def train_reader(self) -> Reader:
        """The records to train on. Raises as `reader`, and `ModelError` where there are none."""
        if (train := self.reader("train")) is None:
            raise ModelError(f"{self.path}: data('train') returned None; there is nothing to train on")
        return train

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The Keras callbacks, if the file defines any.

        Raises:
            ModelError: `callbacks()` raised, or returned something else.
        """
        if not hasattr(self._module, "callbacks"):
            return []
        callbacks = self._call("callbacks")
        if not isinstance(callbacks, list | tuple):
            raise ModelError(f"{self.path}: callbacks() returned a {type(callbacks).__name__}; return a list")
        return list(callbacks)

    def blamed(self, what: str, error: Exception) -> ModelError | None:
        """The error with the line of the model file that raised it; None if it was raised elsewhere."""
        if isinstance(error, ElastableError) or not _own_frames(self.path, error):
            return None
        return _as_model_error(self.path, what, error)

    def _call(self, name: str, *arguments: object) -> object:
        try:
            return getattr(self._module, name)(*arguments)
        except ElastableError:
            raise
        except (Exception, SystemExit) as error:
            raise _as_model_error(self.path, f"{name}({', '.join(map(repr, arguments))})", error) from error


def load_model_file(path: str | Path, sha256: str | None = None) -> ModelFile:
    """Runs the model file at `path`: exactly the bytes that were hashed.

    Args:
        path: Path of the file. Modules that it imports from its own folder are not hashed.
        sha256: Expected hash of its bytes; None: any.

    Raises:
        ModelError: no such file, another hash (then nothing was run), code that raises (with its line), or a file
            without `model`.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ModelError(f"{path}: no such model file")
    spec = importlib.util.spec_from_file_location(f"elastable_model_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ModelError(f"{file}: not a Python file; a model file ends in .py")
    source = file.read_bytes()
    found = hashlib.sha256(source).hexdigest()
    if sha256 not in (None, found):
        raise ModelError(
            f"{file} differs from the master's (sha256 {found[:12]} here, {str(sha256)[:12]} there) and was not run; "
            "every process must run the same model file"
        )
    module = importlib.util.module_from_spec(spec)
    # Modules next to the file can be imported, as with `python MODEL.py`.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[spec.name] = module
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise _as_model_error(file, "loading it", error) from error
    if not callable(getattr(module, "model", None)):
        raise ModelError(f"{file}: defines no model(); a model file defines model() and data(split)")
    return ModelFile(file, found, module)


def _own_frames(file: Path, error: BaseException) -> list[traceback.FrameSummary]:
    """The stack frames of the error that are in the file, or in modules next to it."""
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.dirname(frame.filename)]
    return [frame for frame in inside if Path(frame.filename).parent == file.parent]


def _as_model_error(file: Path, what: str, error: BaseException) -> ModelError:
    own = _own_frames(file, error)
    line = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return ModelError(f"{file}: {what} raised {type(error).__name__}{line}: {error}")
