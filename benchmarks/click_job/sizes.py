"""The sizes of the click model, importable without TensorFlow."""

from __future__ import annotations

__all__ = ["BATCH", "DIM", "FEATURES", "OPTIMIZERS"]

FEATURES = 26
DIM = 16
BATCH = 2_048
OPTIMIZERS = ("SGD", "Adagrad", "Adam")
