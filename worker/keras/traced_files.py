"""The temporary files of AutoGraph, taken away as soon as they have been read.

AutoGraph writes every function that it converts to a file, and removes the files when the process exits: those of a
process that is killed stay for ever, and a master kills workers, as do container engines and people. What stands in a
file is kept for tracebacks and `inspect.getsource`, where Python keeps lines of files that it does not look for again.

Importing this module does it, once for the process.
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
    """As AutoGraph's own `load_source`, without the file."""
    module, file = _load_source(source, delete_on_exit)
    if delete_on_exit:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        with suppress(OSError):  # it is gone already, as after a restart of the machine's clean-up
            os.remove(file)
    return module, file


loader.load_source = _load_and_remove
