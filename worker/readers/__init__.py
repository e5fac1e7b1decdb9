"""Readers: numbered records, any range of which can be fetched. No TensorFlow here."""

from __future__ import annotations

from worker.readers.as_reader import as_reader
from worker.readers.csv_reader import CsvReader
from worker.readers.numpy_reader import NumpyReader
from worker.readers.parquet_reader import ParquetReader
from worker.readers.reader import Batch, Reader
from worker.readers.stream_reader import StreamReader

__all__ = ["Batch", "CsvReader", "NumpyReader", "ParquetReader", "Reader", "StreamReader", "as_reader"]
