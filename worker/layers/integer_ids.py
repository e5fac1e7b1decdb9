"""Makes Sequential models that start with an embedding take integer ids where Keras would assume floats.

A `keras.Sequential` without an Input layer creates a float32 input and casts its arguments to it, which would change
ids above 2**24. So if the first layer is one of our embedding layers, that input becomes int64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import keras

from elastable.worker.keras.structures import TensorLike

__all__ = ["take_integer_ids"]

_SEQUENTIAL_BUILD = keras.Sequential.build.__code__


def take_integer_ids(ids: TensorLike) -> None:
    """Makes the symbolic input int64 of every Sequential model that is being built and passes `ids` on unchanged.

    Args:
        ids: The layer's argument; anything but a float `KerasTensor` is ignored.
    """
    if not isinstance(ids, keras.KerasTensor) or not ids.dtype.startswith("float"):
        return
    for local in _sequentials_being_built():
        if local.get("x") is not ids:
            return  # it has a layer before this one
        layer, ids = local["self"]._layers[0], local["inputs"]
        layer._dtype = "int64"
        ids._dtype = "int64"
        # A Sequential around this one hands its own input to it, which is another tensor.
        ids = _input_of(local["self"])


def _input_of(model: keras.Model) -> keras.KerasTensor | None:
    """The tensor that the model is called with in the Sequential that is being built around it."""
    for local in _sequentials_being_built():
        if local.get("layer") is model:
            return local.get("x")
    return None


def _sequentials_being_built() -> Iterator[dict[str, keras.Layer]]:
    """The variables of every running `Sequential.build`, the innermost first."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _SEQUENTIAL_BUILD:
            yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
