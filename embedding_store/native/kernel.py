"""How numba kernels are compiled: without the GIL, without fast-math, cached on disk.

A kernel may call kernels of any file: see `sources_of`.
"""

import fcntl
import hashlib
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba.core import caching, event
from numba.core.base import BaseContext
from numba.core.codegen import Codegen
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.typing import Signature

from elastable.embedding_store.native.intrinsics import prefetch_line

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., object])

_PREFETCH_VALUES = 128  # of a long row: the processor sees a run by itself
_LINE_VALUES = 16  # float32 in a cache line of 64 bytes
_ANY_ORDER = {"reassoc", "nsz", "contract"}
# Of each array that a row's update reads and writes. Measured on 2 M rows: rows of 8 to 32 values are updated up to
# twice as fast as with 8 rows ahead, rows of 64 and more no slower.
_VALUES_AHEAD = 768
_FEWEST_AHEAD, _MOST_AHEAD = 8, 48


def kernel(function: F) -> F:
    """Compiles `function` at its first call, or loads what an earlier process compiled.

    Arithmetic is IEEE, in the order written (no fast-math, no fused multiply-add), so results do not depend on the
    machine. Division by zero gives Inf or NaN, as in numpy. `NUMBA_CACHE_DIR` names another folder for the compiled
    code, which need not be writable if it holds the kernels already.
    """
    return _compiled(function, fastmath=False)


def summing_kernel(function: F) -> F:
    """As `kernel`, but sums are taken in any order, in as many lanes as the processor has.

    NaN and Inf stay what they are. How the sum over one pair of vectors is taken does not depend on which others are in
    the call, so a pair has the same sum to the bit wherever it is computed, on machines of one kind; other processors
    may differ in the last bit, as with any BLAS.
    """
    return _compiled(function, fastmath=_ANY_ORDER)


def inlined(function: F) -> F:
    """A function that LLVM copies into each kernel that calls it, for the constants of that call."""
    inside: F = numba.njit(forceinline=True, nogil=True, error_model="numpy", fastmath=False)(function)
    return inside


def summing_inlined(function: F) -> F:
    """A function that becomes part of each `summing_kernel` that calls it.

    Before LLVM sees it: LLVM would first reorder the function by itself, and the sums of one kernel would not be those
    of another that is written without the function.
    """
    inside: F = numba.njit(inline="always", nogil=True, error_model="numpy", fastmath=_ANY_ORDER)(function)
    return inside


def by_whole_lines(rows: Callable[[int, A], None]) -> Callable[[int, A], None]:
    """A function `rows(length, arguments)` compiled twice: for rows of whole cache lines, and for any others.

    Of whole lines the compiler knows that vectors come out even, which pays where computation and not memory is the
    limit. The result is to be made a kernel, or to be inlined.
    """
    some = inlined(rows)

    def choose(length: int, arguments: A) -> None:
        if length % _LINE_VALUES == 0:
            some(length // _LINE_VALUES * _LINE_VALUES, arguments)
        else:
            some(length, arguments)

    return choose


def _compiled(function: F, fastmath: bool | set[str]) -> F:
    compiled: F = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    keep_on_disk(compiled)
    return compiled


@inlined
def prefetch(array: npt.NDArray[np.generic], row: int | np.integer) -> None:
    """Asks for the cache lines of `array[row]`; any row will do, even one that does not exist.

    Of long rows only the first 128 values: the processor sees a run by itself.
    """
    prefetch_columns(array, row, array.shape[1])


@inlined
def prefetch_columns(array: npt.NDArray[np.generic], row: int | np.integer, columns: int) -> None:
    """As `prefetch`, of the first columns of a row."""
    for column in range(0, min(columns, _PREFETCH_VALUES), _LINE_VALUES):
        prefetch_line(array, row, column)


@inlined
def prefetch_distance(dim: int) -> int:
    """How many rows ahead of the update a row of `dim` values is asked for."""
    return max(_FEWEST_AHEAD, min(_MOST_AHEAD, _VALUES_AHEAD // dim))


# One process at a time compiles a kernel; the others wait, and load what it saved


_DEADLINE_S = 20.0  # for one kernel; whoever has it may have been stopped
_LOOK_S = 0.02


class CompileLocks:
    """The kernels that this process compiles now. Callers hold numba's compiler lock."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def take(self, lock: Path) -> None:
        """Waits until no other process compiles the kernel of this lock file, for 20 s at most; then this one does.

        Deadlines that pause while this process compiles (`compile_seconds`) pause here, too.
        """
        if lock in self._held:
            return  # it did not compile; this is another attempt
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return  # a disk that is full, say: every process compiles for itself
        self._held[lock] = file
        if _locked(file):
            return
        with event.trigger_event("numba:compile", data={"waits for": str(lock)}):
            give_up = time.monotonic() + _DEADLINE_S
            while time.monotonic() < give_up and not _locked(file):
                time.sleep(_LOOK_S)

    def give_back(self, lock: Path) -> None:
        """The kernel is saved, or cannot be: whoever waits looks for it."""
        file = self._held.pop(lock, None)
        if file is not None:
            # Whoever has opened the file already finds the kernel, and so does whoever makes a new one.
            lock.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: nobody can be waited for
    return True


_EXTERNAL = frozenset({"builtins", "itertools", "llvmlite", "math", "numba", "numpy", "typing"})
"""Packages whose versions, not their sources, decide what is compiled; numba names the llvmlite that it runs with."""

_LOCKS = CompileLocks()


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
            # numba's own place
            setattr(kernel, "_cache", _KernelCache(place(function), function, _options(kernel)))  # noqa: B010
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
        _LOCKS.take(self._lock(stem))
        found = self._saved(name, target_context)  # another process may have compiled it meanwhile
        if found is not None:
            _LOCKS.give_back(self._lock(stem))
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
            _LOCKS.give_back(self._lock(stem))

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
