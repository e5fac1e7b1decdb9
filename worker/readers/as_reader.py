"""Converts the data of `et.fit` or a model file's `data()` to a Reader."""

from __future__ import annotations

from collections.abc import Mapping

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.readers.records.reader import Reader
from elastable.worker.readers.streams.endless_reader import EndlessReader
from elastable.worker.readers.streams.stream_reader import is_iterator, is_stream

__all__ = ["as_reader"]

_RIGHT = "give a Reader, a tuple (x, y) or (x, y, sample_weight) of arrays, or a dict with the keys x, y, sample_weight"


def as_reader(data: object, endless: bool = False) -> Reader:
    """A Reader of `data`.

    Args:
        data: A Reader; a tuple (x,), (x, y) or (x, y, sample_weight); a dict with the key "x" and optionally "y" and
            "sample_weight". x, y and sample_weight are arrays or pytrees of them.
        endless: Whether an EndlessReader is allowed: for training data, not for validation data.

    Raises:
        BadInput: anything else; the message says what to pass. Streams too: only the user knows whether all processes
            see the same records.
    """
    if isinstance(data, EndlessReader) and not endless:
        raise BadInput(
            "an EndlessReader is for training alone, in et.fit and jobs; give et.StreamReader(stream, count=...)"
        )
    if isinstance(data, Reader):
        if len(data) == 0:
            raise BadInput(f"{type(data).__name__}: empty; there must be at least one record")
        return data
    if isinstance(data, Mapping):
        unknown = [key for key in data if key not in ("x", "y", "sample_weight")]
        if unknown or "x" not in data:
            raise BadInput(f"data is a dict with the keys {', '.join(map(repr, data)) or '(none)'}; {_RIGHT}")
        return NumpyReader(**data)
    if isinstance(data, tuple):
        if not 1 <= len(data) <= 3:
            raise BadInput(f"data is a tuple of {len(data)}; {_RIGHT}")
        return NumpyReader(*data)
    raise BadInput(f"data is a {_kind(data)}; {_RIGHT}")


def _kind(data: object) -> str:
    if is_stream(data) or is_iterator(data):
        return (f"{type(data).__name__}, a stream, and a job's seeded order fetches records by number: wrap it in "
                "et.StreamReader, which reads it once, or, without an end, in et.EndlessReader")  # fmt: skip
    if hasattr(data, "__array__"):
        return f"{type(data).__name__} alone"
    return type(data).__name__
