"""Checks that Keras runs on TensorFlow, before Keras is imported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from elastable.embedding_store.errors import Unsupported

__all__ = ["keras_backend", "require_tensorflow"]


def keras_backend() -> str:
    """The backend that Keras runs on, or would if it were imported now: KERAS_BACKEND, else keras.json."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return str(keras.config.backend())
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    home = os.environ.get("KERAS_HOME") or Path("~/.keras").expanduser()
    try:
        found = json.loads((Path(home) / "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        found = None  # Keras ignores such a file, too
    return str(found or "tensorflow")


def require_tensorflow() -> None:
    """Refuses any backend but TensorFlow.

    Raises:
        Unsupported: Keras runs on JAX, PyTorch or another backend.
    """
    backend = keras_backend()
    if backend != "tensorflow":
        raise Unsupported(
            f"Elastable's layers run on Keras' TensorFlow backend, and Keras is set to {backend!r}: set "
            "KERAS_BACKEND=tensorflow before anything imports Keras"
        )
