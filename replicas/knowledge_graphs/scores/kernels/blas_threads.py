"""How many threads OpenBLAS, NumPy's library for matrix products, may use: one, while our own share the work."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["blas_threads", "one_blas_thread"]

_PREFIXES, _SUFFIXES = ("scipy_", ""), ("64_", "")
"""Of the names of its functions, in NumPy's wheels and elsewhere."""


@dataclass(frozen=True, slots=True)
class _Library:
    """An OpenBLAS that this process has loaded; its number of threads is the whole process'."""

    threads: Callable[[], int]
    set_threads: Callable[[int], object]


@lru_cache(maxsize=1)
def _libraries() -> tuple[_Library, ...]:
    files = set()
    with suppress(OSError), Path("/proc/self/maps").open() as lines:
        for line in lines:
            file = line.rstrip("\n").partition("/")[2]
            if "openblas" in file.rpartition("/")[2]:
                files.add(f"/{file}")
    found = []
    for file in sorted(files):
        with suppress(OSError):
            library = ctypes.CDLL(file)
            for prefix, suffix in ((prefix, suffix) for prefix in _PREFIXES for suffix in _SUFFIXES):
                get, put = (getattr(library, f"{prefix}openblas_{what}_num_threads{suffix}", None) for what in _WHAT)
                if get is not None and put is not None:
                    found.append(_Library(get, put))
                    break
    return tuple(found)


_WHAT = ("get", "set")


class _Users:
    """How many callers are inside `one_blas_thread`: the first sets the limit, the last lifts it."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, list[int]()


_USERS = _Users()


def blas_threads() -> list[int]:
    """The number of threads of every OpenBLAS of this process."""
    return [int(library.threads()) for library in _libraries()]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it, OpenBLAS computes in its caller's thread alone, in all threads of this process.

    Another library for matrix products is left as it is.
    """
    with _USERS.lock:
        if _USERS.inside == 0:
            _USERS.before = blas_threads()
            _set([1] * len(_USERS.before))
        _USERS.inside += 1
    try:
        yield
    finally:
        with _USERS.lock:
            _USERS.inside -= 1
            if _USERS.inside == 0:
                _set(_USERS.before)


def _set(threads: list[int]) -> None:
    for library, count in zip(_libraries(), threads, strict=True):
        library.set_threads(count)
