"""Readers: numbered records, any range of which can be fetched. No TensorFlow here."""

from __future__ import annotations

from elastable.worker.readers.as_reader import as_reader
from elastable.worker.readers.csv_reader import CsvReader
from elastable.worker.readers.endless_reader import EndlessReader
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.readers.parquet_reader import ParquetReader
from elastable.worker.readers.pass_reader import PassReader
from elastable.worker.readers.ragged import RaggedArray, SparseArray
from elastable.worker.readers.reader import Batch, Reader
from elastable.worker.readers.stream_reader import StreamReader

__all__ = [
    "Batch",
    "CsvReader",
    "EndlessReader",
    "NumpyReader",
    "ParquetReader",
    "PassReader",
    "RaggedArray",
    "Reader",
    "SparseArray",
    "StreamReader",
    "as_reader",
]
