"""Tensors of any dtype of Keras in safetensors files: NumPy's reader knows nothing of bfloat16 and its like."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from master.api import Tensor

__all__ = ["from_plain", "to_plain"]

_PLAIN = "biuf"


def to_plain(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Contiguous tensors of NumPy's own dtypes with the same bytes, and by key the dtype of those that had another."""
    plain, dtypes = {}, {}
    for key, tensor in tensors.items():
        laid = np.asarray(tensor, order="C")
        if laid.dtype.kind not in _PLAIN or not laid.dtype.isnative:
            dtypes[key] = str(laid.dtype)
            laid = laid.view(np.dtype(f"u{laid.dtype.itemsize}"))
        plain[key] = laid
    return plain, dtypes


def from_plain(tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """What `to_plain` was given.

    Raises:
        TypeError: a dtype that is not known here.
    """
    import ml_dtypes  # noqa: F401 - makes its dtypes known to NumPy by name

    return {key: tensor.view(np.dtype(dtypes[key])) if key in dtypes else tensor for key, tensor in tensors.items()}
