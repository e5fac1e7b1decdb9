"""End-to-end examples/s of a click model, compared with plain Keras.

26 categorical features share one table of N rows of 16 values with uniform ids,
followed by an MLP; a batch has 2,048 examples. Elastable is one master
process with the memory store and one worker process; plain Keras is
`keras.layers.Embedding` and `model.fit` in one process.

    python -m benchmarks.jobs.click [ROWS ...]
"""

import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.click_job.contender import Contender, ready
from benchmarks.click_job.contenders import click_job, plain_keras
from benchmarks.click_job.sizes import OPTIMIZERS
from benchmarks.harness import Rounds, Row, compare, interleaved, publish

_TABLES = (100_000, 1_000_000, 5_000_000)
_FLOORS = {(100_000, "SGD"): 0.7, (5_000_000, "Adam"): 6.0}
_INDEPENDENT = 0.8  # of the largest table's examples/s against the smallest's
_ROUNDS = 5
_SECONDS = 1.5  # of one turn

_KERAS, _OURS, _OURS_ALONE = "Keras", "2 threads", "1 thread"


def main(tables: tuple[int, ...] = _TABLES) -> None:
    """Measures, prints and writes `results/click.json`."""
    figures = {(rows, optimizer): _measure(rows, optimizer) for optimizer in OPTIMIZERS for rows in tables}
    lines = []
    for (rows, optimizer), rounds in figures.items():
        name = f"click, {optimizer}, {rows:,} rows"
        floor = _FLOORS.get((rows, optimizer))
        lines.append(compare(f"{name}, against Keras", "examples/s", rounds[_OURS], rounds[_KERAS], floor))
        lines.append(compare(f"{name}, 1 thread in the worker", "examples/s", rounds[_OURS_ALONE], rounds[_KERAS]))
    lines += [_independence(figures, optimizer, tables) for optimizer in OPTIMIZERS if len(tables) > 1]
    publish("click", "Click model: one worker and a master, against plain Keras in one process", lines)


def raced(contenders: Mapping[str, Contender]) -> Rounds:
    """Examples/s of everyone in every round; all are started before, and closed."""
    with ready(*contenders.values()):
        turns = {name: partial(contender.examples_per_second, _SECONDS) for name, contender in contenders.items()}
        return interleaved(turns, _ROUNDS)


def _measure(rows: int, optimizer: str) -> Rounds:
    """Examples/s of everyone in every round."""
    with tempfile.TemporaryDirectory(prefix="click-") as folder:
        home = Path(folder)
        contenders: dict[str, Contender] = {
            _KERAS: plain_keras(rows, optimizer, home),
            _OURS: click_job("2", rows, optimizer, home),
            _OURS_ALONE: click_job("1", rows, optimizer, home, threads=1),
        }
        rounds = raced(contenders)
    shown = ", ".join(f"{name} {' '.join(f'{figure:,.0f}' for figure in of)}" for name, of in rounds.items())
    print(f"{optimizer}, {rows:,} rows: {shown}", flush=True)
    return rounds


def _independence(figures: dict[tuple[int, str], Rounds], optimizer: str, tables: tuple[int, ...]) -> Row:
    small, large = (figures[rows, optimizer][_OURS] for rows in (min(tables), max(tables)))
    name = f"click, {optimizer}, {max(tables):,} rows against {min(tables):,}"
    return compare(name, "examples/s", large, small, _INDEPENDENT)


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or _TABLES)
