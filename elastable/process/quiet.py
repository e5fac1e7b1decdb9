"""TensorFlow's start without its chatter, and without the garbage collections of an import.

TensorFlow writes about drivers and CPU features straight to file descriptor 2 before any log level is in force. A
person who sets TF_CPP_MIN_LOG_LEVEL sees all of it.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from elastable.process.heap import without_collections


def import_tensorflow() -> None:
    """Imports TensorFlow; what it writes is shown only if it fails."""
    with _shown_if_it_fails(), without_collections():
        import tensorflow as tf

        # Looking for devices is what it complains of most.
        tf.config.list_physical_devices()


def quiet_when_imported() -> None:
    """The same for a program that may import TensorFlow itself, and need not."""
    sys.meta_path.insert(0, _QuietTensorFlow())


class _QuietTensorFlow(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_quietly(module: ModuleType) -> None:
            with _shown_if_it_fails(), without_collections():
                run(module)
                module.config.list_physical_devices()

        spec.loader.exec_module = run_quietly  # type: ignore[method-assign]
        return spec


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
