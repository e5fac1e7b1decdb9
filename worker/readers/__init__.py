"""Readers: numbered records, fetched in any order. No TensorFlow here."""

from __future__ import annotations

from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.readers.numpy_reader import NumpyReader, as_reader
from elastable.worker.readers.pass_reader import PassReader
from elastable.worker.readers.records.ragged import RaggedArray, SparseArray
from elastable.worker.readers.records.reader import Batch, Reader
from elastable.worker.readers.streams.endless_reader import EndlessReader
from elastable.worker.readers.streams.stream_reader import StreamReader
from elastable.worker.readers.views import ClassWeightReader, PartReader

__all__ = [
    "Batch",
    "ClassWeightReader",
    "CsvReader",
    "EndlessReader",
    "NumpyReader",
    "ParquetReader",
    "PartReader",
    "PassReader",
    "RaggedArray",
    "Reader",
    "SparseArray",
    "StreamReader",
    "as_reader",
]
