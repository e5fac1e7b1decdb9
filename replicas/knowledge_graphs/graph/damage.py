"""What reading raises for a file of others that is damaged, or made up to be."""

from __future__ import annotations

import csv
import zipfile
import zlib

from elastable.embedding_store.contract.malformed import UNREADABLE

__all__ = ["DAMAGED"]

DAMAGED: tuple[type[Exception], ...] = (
    *UNREADABLE,
    EOFError,  # a file that is cut off
    zlib.error,
    zipfile.BadZipFile,
    csv.Error,
    MemoryError,  # of a shape that no machine could hold
    NotImplementedError,  # a compression that Python does not know
    RuntimeError,  # an archive with a password
    ZeroDivisionError,
)
"""For code that reads arrays of `np.load`, or text of `gzip`, and makes something of them."""
