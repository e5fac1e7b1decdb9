"""Compiled kernels on disk, keyed by the sources of everything that they call.

numba's own cache watches only the file of the function itself: a kernel that calls another one goes on running the
old code after the other's file has changed. Here the key of a kernel holds the contents of every file whose functions
it reaches, and the values of the constants that are compiled into it.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import numba
import numpy as np
from numba.core import caching
from numba.core.base import BaseContext
from numba.core.codegen import Codegen
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.typing import Signature

from elastable.embedding_store.native.compile_turns import CompileTurns

__all__ = ["keep_on_disk", "sources_of"]

_EXTERNAL = frozenset({"builtins", "itertools", "llvmlite", "math", "numba", "numpy", "typing"})
"""Packages whose versions, not their sources, decide what is compiled; numba names the llvmlite that it runs with."""

_TURNS = CompileTurns()


def keep_on_disk(kernel: Callable[..., object]) -> None:
    """Makes a kernel load what an earlier process compiled, and save what it compiles.

    The files lie where numba's own would: in `NUMBA_CACHE_DIR`, in the `__pycache__` next to the source, or below the
    home. A folder that cannot be written is read all the same, so that an image with a read-only root file system can
    bring its kernels. Without any folder, every process compiles anew.
    """
    function = _function(kernel)
    assert function is not None
    for place in (caching.CompileResultCacheImpl, _ReadOnlyPlace):
        with suppress(RuntimeError):  # numba's: no such folder
            setattr(kernel, "_cache", _KernelCache(place(function), function, _options(kernel)))  # noqa: B010 - numba's own place
            return


class _ReadOnlyLocator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    def ensure_cache_path(self) -> None:
        """The folder must exist; numba's own locator requires that it can be written."""
        if not os.path.isdir(self.get_cache_path()):
            raise FileNotFoundError(self.get_cache_path())


class _ReadOnlyPlace(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_ReadOnlyLocator]  # noqa: RUF012 - numba's name, read as it is


class _KernelCache(caching.NullCache):  # type: ignore[misc]
    """One file per kernel, signature and processor; a file of older sources is replaced."""

    def __init__(
        self, place: caching.CompileResultCacheImpl, function: FunctionType, options: list[tuple[str, str]]
    ) -> None:
        self._place, self._function, self._options = place, function, options
        self._folder = Path(place.locator.get_cache_path())
        self._files = caching.IndexDataCacheFile(str(self._folder), place.filename_base, None)  # without its index
        _contents(function.__code__.co_filename)  # as they are imported, not as they are when it is first called

    @property
    def cache_path(self) -> str:
        """The folder of the files."""
        return str(self._folder)

    def load_overload(self, sig: Signature, target_context: BaseContext) -> CompileResult | None:
        """The compiled kernel; None if there is none of these sources, and it is for this process to compile it."""
        target_context.refresh()
        stem, sources = self._names(sig, target_context.codegen())
        name = f"{stem}.{sources}.nbc"
        found = self._saved(name, target_context)
        if found is not None or isinstance(self._place, _ReadOnlyPlace):
            return found
        self._place.locator.ensure_cache_path()
        _TURNS.take(self._lock(stem))
        found = self._saved(name, target_context)  # another process may have compiled it meanwhile
        if found is not None:
            _TURNS.give_back(self._lock(stem))
        return found

    def _saved(self, name: str, target_context: BaseContext) -> CompileResult | None:
        try:
            return self._place.rebuild(target_context, self._files._load_data(name))
        except FileNotFoundError:
            return None

    def save_overload(self, sig: Signature, data: CompileResult) -> None:
        """Saves a compiled kernel, if the folder can be written."""
        if isinstance(self._place, _ReadOnlyPlace):
            return
        stem, sources = self._names(sig, data.codegen)
        try:
            if self._place.check_cachable(data):
                self._place.locator.ensure_cache_path()
                self._save(stem, f"{stem}.{sources}.nbc", data)
        finally:
            _TURNS.give_back(self._lock(stem))

    def _save(self, stem: str, name: str, data: CompileResult) -> None:
        self._files._save_data(name, self._place.reduce(data))  # a reader sees all of it or nothing
        for older in self._folder.glob(f"{stem}.*.nbc"):
            if older.name != name:
                older.unlink(missing_ok=True)

    def _lock(self, stem: str) -> Path:
        return self._folder / f"{stem}.lock"

    def _names(self, signature: Signature, codegen: Codegen) -> tuple[str, str]:
        """The kernel with its signature and its processor, and the digest of its sources."""
        variant = signature, self._options, codegen.magic_tuple(), numba.__version__, _captured(self._function)
        return f"{self._place.filename_base}.{_digest(repr(variant))}", sources_of(self._function)


def sources_of(function: FunctionType) -> str:
    """A digest of all that decides what a function is compiled to, but for its signature and the processor.

    These are the files of the function and of each function, kernel and intrinsic that it reaches by a name or a
    closure, what these are compiled with, and the values of the constants among those names.
    """
    files, constants, seen = set[str](), set[str](), set[int]()
    waiting = [function]
    while waiting:
        reached = waiting.pop()
        if id(reached) in seen or _package(reached) in _EXTERNAL:
            continue
        seen.add(id(reached))
        files.add(reached.__code__.co_filename)
        for name, value in _names_of(reached):
            inner = _function(value)
            if inner is not None:
                waiting.append(inner)
                constants.add(f"{name}: {_options(value)}")
            elif inspect.isclass(value):
                if _package(value) not in _EXTERNAL:
                    files.add(inspect.getfile(value))
            elif not isinstance(value, ModuleType):
                constants.add(f"{name}={_constant(value)}")
    return _digest("\n".join([*sorted(_contents(file) for file in files), *sorted(constants)]))


def _captured(function: FunctionType) -> list[str]:
    """What tells functions apart that one definition made: the names of captured functions, the values of the rest."""
    found = []
    for value in inspect.getclosurevars(function).nonlocals.values():
        inner = _function(value)
        captured = [inner.__module__, inner.__qualname__, *_captured(inner)] if inner is not None else _constant(value)
        found.append(str(captured))
    return found


def _names_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What a function's code may refer to: its closure, and each global whose name occurs in it."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        if value is not None:
            yield name, value


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _function(value: object) -> FunctionType | None:
    """The Python function of a function, a kernel or an intrinsic; None for anything else."""
    if isinstance(value, Dispatcher):
        value = value.py_func
    elif isinstance(value, _Intrinsic):
        value = value._defn
    return value if isinstance(value, FunctionType) else None


def _options(value: object) -> list[tuple[str, str]]:
    """What a kernel is compiled with: sums in any order or not, merged into its caller or not."""
    options = getattr(value, "targetoptions", {}).items()
    return sorted((name, repr(sorted(option) if isinstance(option, set) else option)) for name, option in options)


def _constant(value: object) -> str:
    return f"{value.dtype}{value.tolist()}" if isinstance(value, np.ndarray) else repr(value)


def _package(value: FunctionType | type) -> str:
    return value.__module__.partition(".")[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _contents(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
