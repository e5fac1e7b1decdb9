"""Readers: numbered records, any range of which can be fetched. No TensorFlow here."""

from __future__ import annotations

from worker.readers.as_reader import as_reader
from worker.readers.numpy_reader import NumpyReader
from worker.readers.reader import Batch, Reader

__all__ = ["Batch", "NumpyReader", "Reader", "as_reader"]
