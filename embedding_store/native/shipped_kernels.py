"""Compiled kernels that are read from a folder which this process cannot write: a container with a read-only root.

numba takes a cache folder only where it can be written. An image that ships its kernels (`NUMBA_CACHE_DIR`) would
compile them anew in each process where its root file system is read-only.
"""

from __future__ import annotations

import os
from typing import Any

from numba.core import caching

__all__ = ["read_shipped"]


class _ShippedLocator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    def ensure_cache_path(self) -> None:
        """The folder has to be there; numba's own check is that it can be written."""
        if not os.path.isdir(self.get_cache_path()):
            raise FileNotFoundError(self.get_cache_path())


class _ShippedFiles(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_ShippedLocator]  # noqa: RUF012 - numba's name, read as it is


class _ShippedKernels(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _ShippedFiles

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """What the folder lacks is compiled in each process."""


def read_shipped(compiled: Any) -> None:
    """Makes a function of `numba.njit(cache=False)` look in `NUMBA_CACHE_DIR`, if kernels of its module are there."""
    try:
        compiled._cache = _ShippedKernels(compiled.py_func)
    except RuntimeError:  # numba's: no folder
        return
