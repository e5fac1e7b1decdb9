"""The click model from end to end, against what a user of Keras would pick instead.

TensorFlow's ParameterServerStrategy has one server and one or two workers, Elastable a master and as many workers;
tables are in memory. recommenders-addons has its table in Redis, and Elastable a store there, at the same server. Data,
batches and thread counts are the same. The dense step alone takes its turn, too: what is left of the processor's time
once all else costs nothing, and so the most that any parameter server could make of these cores.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.click_job.contender import Contender
from benchmarks.click_job.contenders import StepCounter, click_job, click_variables, dense_step
from benchmarks.harness import Row
from benchmarks.jobs.click import raced
from benchmarks.peers.environments import RECOMMENDERS_ADDONS
from benchmarks.peers.races import row_of
from benchmarks.peers.workloads import THREADS

_RACES = ((100_000, "SGD", 2.5), (5_000_000, "Adagrad", 4.0), (5_000_000, "Adam", 10.0))
_REDIS_RACES = ((100_000, "SGD", 4.0), (1_000_000, "Adagrad", 4.0))
_WORKERS = (1, 2)
_SIDES = "benchmarks.peers.sides"


def click_rows(home: Path) -> list[Row]:
    """Against ParameterServerStrategy, with one worker and with two."""
    lines = []
    for rows, optimizer, floor in _RACES:
        folder = Path(tempfile.mkdtemp(prefix="servers-", dir=home))
        contenders: dict[str, Contender] = {"dense": dense_step(optimizer, folder)}
        for workers in _WORKERS:
            name = f"ours-{workers}"
            contenders[name] = click_job(name, rows, optimizer, folder, threads=THREADS, workers=workers)
            if RECOMMENDERS_ADDONS.present:
                variables = {"CLICK_WORKERS": str(workers)}
                contenders[f"servers-{workers}"] = _peer("parameter_server", rows, optimizer, folder, variables)
        figures = _raced(contenders)
        for workers in _WORKERS:
            servers = figures.get(f"servers-{workers}")
            what = f"click, {optimizer}, {rows:,} rows, {workers} worker{'s' * (workers > 1)}"
            name = f"{what}, against ParameterServerStrategy"
            lines.append(row_of(name, "examples/s", figures[f"ours-{workers}"], servers, floor))
            most = f"dense step alone, {name.removeprefix('click, ')}"
            lines.append(row_of(most, "examples/s", figures["dense"], servers, None))
    return lines


def redis_click_rows(home: Path, address: str) -> list[Row]:
    """Against recommenders-addons, tables of both in the Redis server at `address`."""
    lines = []
    for rows, optimizer, floor in _REDIS_RACES:
        folder = Path(tempfile.mkdtemp(prefix="redis-", dir=home))
        store = ("--store", f"redis://{address}?deadline=120", "--overwrite")
        contenders: dict[str, Contender] = {"ours": click_job("ours", rows, optimizer, folder, store, threads=THREADS)}
        if RECOMMENDERS_ADDONS.present:
            variables = {"CLICK_REDIS": address}
            contenders["theirs"] = _peer("recommenders_click", rows, optimizer, folder, variables)
        name = f"click, {optimizer}, {rows:,} rows in Redis, against recommenders-addons"
        figures = _raced(contenders)
        lines.append(row_of(name, "examples/s", figures["ours"], figures.get("theirs"), floor))
    return lines


def _peer(side: str, rows: int, optimizer: str, home: Path, variables: Mapping[str, str]) -> StepCounter:
    environment = {**click_variables(rows, optimizer), **dict(RECOMMENDERS_ADDONS.variables), **variables}
    log = home / f"{'-'.join([side, *variables.values()]).replace(':', '-')}.log"
    return StepCounter([str(RECOMMENDERS_ADDONS.python), "-m", f"{_SIDES}.{side}"], environment, log)


def _raced(contenders: Mapping[str, Contender]) -> Mapping[str, list[float]]:
    figures = {name: list(of) for name, of in raced(contenders).items()}
    print({name: [round(figure) for figure in of] for name, of in figures.items()}, flush=True)
    return figures
