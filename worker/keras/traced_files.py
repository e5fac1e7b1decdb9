"""Removes AutoGraph's temporary files as soon as they have been read.

AutoGraph writes every function that it converts to a file, and removes the files when the process exits. Files of a
killed process stay for ever, and workers are killed by masters, container engines and people. The source is kept in
`linecache`, for tracebacks and `inspect.getsource`.

Importing this module replaces AutoGraph's loader, once per process.
"""

from __future__ import annotations

import linecache
import os
from contextlib import suppress
from types import ModuleType

from tensorflow.python.autograph.pyct import loader

__all__: list[str] = []

_load_source = loader.load_source


def _load_and_remove(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """AutoGraph's `load_source`, without leaving the file."""
    module, file = _load_source(source, delete_on_exit)
    if delete_on_exit:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        with suppress(OSError):  # already gone, removed by a clean-up of the machine
            os.remove(file)
    return module, file


loader.load_source = _load_and_remove
