"""Measures, stores and prints figures.

A figure is the median of several rounds. In every round each contender takes a
turn, so that other load on the machine affects all of them alike. A row
compares one figure with its reference, measured in the same rounds.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table

from elastable.worker.keras.keras_backend import keras_backend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"

Rounds = Mapping[str, Sequence[float]]
"""Contender -> its figure in every round, in the same order of rounds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, one entry of a result file.

    Attributes:
        name: What was measured.
        value: The median.
        unit: Of value and reference; more is better, but for "us".
        reference: The figure it is compared with, in the same unit.
        ratio: value / reference, from the same rounds; of times reference /
            value, so that more is better.
        floor: The lowest acceptable ratio; None: only shown.
        note: Why there is no value, reference or ratio, where one is None.
    """

    name: str
    value: float | None
    unit: str
    reference: float | None = None
    ratio: float | None = None
    floor: float | None = None
    note: str | None = None

    @classmethod
    def at_most(cls, name: str, value: float, unit: str, most: float) -> "Row":
        """A figure of which less is better, and more than `most` is too much."""
        return cls(name, value, unit, most, most / value, 1.0)

    @property
    def verdict(self) -> str:
        """Whether the floor is reached."""
        if self.ratio is None:
            return self.note or ""
        if self.floor is None:
            return ""
        return "ok" if self.ratio >= self.floor else "below"


def interleaved(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """The figures of every contender, each called once a round, in turns that begin with another one each time."""
    names = list(contenders)
    figures: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(contenders[name]())
    return figures


def compare(
    name: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    floor: float | None = None,
    less: bool = False,
) -> Row:
    """Medians, and the median of the rounds' ratios.

    Args:
        name: What was measured.
        unit: Of both.
        ours: Our figure in every round.
        theirs: The reference's, in the same rounds.
        floor: The lowest acceptable ratio.
        less: Whether less is better, as it is of "us" in any case.
    """
    pairs = zip(ours, theirs, strict=True)
    ratios = [other / own if less or unit == "us" else own / other for own, other in pairs]
    return Row(name, statistics.median(ours), unit, statistics.median(theirs), statistics.median(ratios), floor)


Work = Callable[[], object]
"""Does once what is measured."""


def versus(
    name: str,
    unit: str,
    ours: Work,
    theirs: Work,
    amount: float,
    rounds: int,
    floor: float | None = None,
    at_least_s: float = 0.2,
) -> Row:
    """Compares how much of two works is done a second; see `rates` and `compare`."""
    figures = rates({"ours": ours, "theirs": theirs}, amount, rounds, at_least_s)
    return compare(name, unit, figures["ours"], figures["theirs"], floor)


def rates(works: Mapping[str, Work], amount: float, rounds: int, at_least_s: float = 0.2) -> Rounds:
    """What each work does of `amount` a second, in every round; see `interleaved` and `rate`."""
    return interleaved({name: rate(work, amount, at_least_s) for name, work in works.items()}, rounds)


def rate(work: Work, amount: float, at_least_s: float = 0.2) -> Callable[[], float]:
    """A contender that repeats `work` for a while and gives `amount` a second, of its median run."""

    def measure() -> float:
        seconds: list[float] = []
        end = time.perf_counter() + at_least_s
        while time.perf_counter() < end or len(seconds) < 3:
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return amount / statistics.median(seconds)

    return measure


def machine() -> str:
    """The machine and the versions behind the figures, in one line."""
    packages = (keras_backend(), "keras", "numpy", "numba", "grpcio", "redis")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ", ".join(
        [
            f"{cores} cores {_processor()}",
            f"{platform.system()} {platform.release().split('-')[0]}",
            f"Python {platform.python_version()}",
            *(f"{package} {version(package)}" for package in packages),
        ]
    )


def publish(bench: str, title: str, rows: Sequence[Row]) -> None:
    """Writes `results/<bench>.json`, a list of rows, and prints them as a table."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps([_written(row) for row in rows], indent=1)
    (RESULTS / f"{bench}.json").write_text(text + "\n")
    table = Table(title=title, caption=f"{date.today()}, {machine()}", title_justify="left", caption_justify="left")
    table.add_column("measured")
    for column in ("value", "unit", "reference", "ratio", "floor", ""):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for row in rows:
        floor = "" if row.floor is None else f"{row.floor:g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        style = {"ok": "green", "below": "red"}.get(row.verdict)
        figures = (_shown(row.value), row.unit, _shown(row.reference), ratio, floor, row.verdict)
        table.add_row(row.name, *figures, style=style)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@contextmanager
def drawing(file: Path, x: str, y: str, size: tuple[float, float] = (6, 4)) -> Iterator["Axes"]:
    """A panel with these axes, which is a picture in `file` at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "elastable"  # the same picture of the same figures
    figure, panel = pyplot.subplots(figsize=size)
    panel.set(xlabel=x, ylabel=y)
    panel.grid(alpha=0.3)
    yield panel
    panel.legend(fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)


def _written(row: Row) -> dict[str, object]:
    """The row without a note that it does not have."""
    return {name: value for name, value in asdict(row).items() if name != "note" or value is not None}


def _shown(figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:,.{0 if figure >= 1000 else 1 if figure >= 10 else 2}f}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.machine()
    found = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return found[0].partition(":")[2].strip() if found else platform.machine()
