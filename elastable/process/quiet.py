"""TensorFlow's start without its chatter, and without the garbage collections of an import.

TensorFlow writes about drivers and CPU features straight to file descriptor 2 before any log level is in force. A
person who sets TF_CPP_MIN_LOG_LEVEL sees all of it.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from elastable.process.heap import without_collections
from elastable.worker.keras.keras_backend import ImportHook, keras_backend, require_backend


def import_backend() -> None:
    """Imports what Keras runs on; what TensorFlow writes is shown only if it fails.

    Raises:
        Unsupported: Keras is set to a backend that nothing here runs on.
    """
    require_backend()
    with _shown_if_it_fails(), without_collections():
        if keras_backend() != "tensorflow":
            import_module("keras")
            return
        import tensorflow as tf

        # Looking for devices is what it complains of most.
        tf.config.list_physical_devices()


def quiet_when_imported() -> None:
    """The same for a program that may import TensorFlow itself, and need not."""

    def run_quietly(load: Callable[[ModuleType], None], module: ModuleType) -> None:
        with _shown_if_it_fails(), without_collections():
            load(module)
            module.config.list_physical_devices()

    sys.meta_path.insert(0, ImportHook("tensorflow", run_quietly))


@contextmanager
def _shown_if_it_fails() -> Iterator[None]:
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            written.seek(0)
            os.write(kept, written.read())
            raise
        finally:
            # It has been read by now; child processes decide for themselves.
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]
            os.dup2(kept, 2)
            os.close(kept)
