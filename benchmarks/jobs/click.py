"""End-to-end examples/s of a click model, compared with plain Keras.

26 categorical features share one table of N rows of 16 values with uniform ids,
followed by an MLP; a batch has 2,048 examples. Elastable is one master
process with the memory store and one worker process; plain Keras is
`keras.layers.Embedding` and `model.fit` in one process.

`ray`: `examples/flights` with two workers, as local processes, on a warm Ray of this machine, and on the same by its
client (`ray://`), as from elsewhere, in turns; and what kills cost there, from the kill to the next version
(micro-batches of its version that a worker held are trained by the other; a master goes on from its last checkpoint).

    python -m benchmarks.jobs.click [ROWS ...] | ray
"""

import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.click_job.contender import Contender, ready
from benchmarks.click_job.contenders import click_job, plain_keras
from benchmarks.click_job.sizes import OPTIMIZERS
from benchmarks.harness import Rounds, Row, compare, interleaved, publish
from elastable.embedding_store.errors import ElastableError
from elastable.master.rpc.client import MasterClient
from tests.elastable.jobs.engines.test_ray_jobs import ENVIRONMENT, Cluster, node
from tests.elastable.processes import Running, elastable
from tests.ports import free_port
from tests.waiting import until

_TABLES = (100_000, 1_000_000, 5_000_000)
_FLOORS = {(100_000, "SGD"): 0.7, (5_000_000, "Adam"): 6.0}
_INDEPENDENT = 0.8  # of the largest table's examples/s against the smallest's
_ROUNDS = 5
_SECONDS = 1.5  # of one turn

_RAY_ROUNDS, _KILLS, _RAY_LIMIT_S = 3, 3, 600.0
_FLIGHTS = ("train", Path(__file__).parents[2] / "examples" / "flights" / "model.py", "--workers", "2", "--no-export")
_SAME_JOB = ("--micro-batch-size", "512", "--grads-to-wait", "2", "--seed", "7", "--epochs")

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


def on_ray() -> None:
    """Measures, prints and writes `results/click_ray.json`."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # its sockets may have no long paths
        home, client = Path(folder), free_port()
        head = ("--head", "--include-dashboard=false", f"--port={free_port()}", f"--temp-dir={folder}/ray")
        with node(home, *head, "--num-cpus=16", f"--ray-client-server-port={client}") as (_, said):
            host = re.search(r"--address='(\S+):(\d+)'", said)
            assert host, said
            there = Cluster(home, f"ray://{host[1]}:{client}", f"{host[1]}:{host[2]}")
            engines = {"local": (), "Ray": ("--on", "ray", "--insecure"), "client": ("--on", there.url, "--insecure")}
            jobs = {name: partial(_flights, home, on, {"RAY_ADDRESS": there.gcs}) for name, on in engines.items()}
            runs = interleaved(jobs, _RAY_ROUNDS)
            kills = {role: _killed(there, home, role, engines["client"]) for role in ("worker", "master")}
    pace, start = ({name: [run[place] for run in runs[name]] for name in runs} for place in (0, 1))
    longer = {name: statistics.median(start[name]) / statistics.median(start["local"]) for name in start}
    rows = [
        compare("flights on Ray, against local processes", "examples/s", pace["Ray"], pace["local"], 0.95),
        compare("flights on Ray by its client, against local processes", "examples/s", pace["client"], pace["local"]),
        Row.at_most("start to the first version on Ray, of that with local processes", longer["Ray"], "x", 1.3),
        Row("start to the first version on Ray by its client, of the same", longer["client"], "x"),
        Row.at_most("worker killed on Ray to the next version", statistics.median(kills["worker"]), "s", 3.0),
        Row("master killed on Ray to the next version, its start included", statistics.median(kills["master"]), "s"),
    ]
    publish("click_ray", "A job on a local Ray, against the same job of local processes", rows)


def _flights(home: Path, on: tuple[str, ...], variables: Mapping[str, str]) -> tuple[float, float]:
    """Examples/s of a job, and seconds from its command to its first version."""
    began, environment = time.monotonic(), {**ENVIRONMENT, **variables}
    with elastable(home, *_FLIGHTS, *_SAME_JOB, "4", "--run-dir", home / "runs", *on, env=environment, new=True) as job:
        _until_version(job, 1)
        first = time.monotonic() - began
        assert job.wait(_RAY_LIMIT_S) == 0, job.err
    return float(json.loads((home / "runs" / "latest" / "result.json").read_text())["examples_per_second"]), first


def _killed(cluster: Cluster, home: Path, role: str, on: tuple[str, ...]) -> list[float]:
    """Seconds from each kill of a process to a version after it."""
    took: list[float] = []
    places = ("--run-dir", home / "runs", "--checkpoint-dir", home / role, "--checkpoint-every", "20")
    with elastable(home, *_FLIGHTS, *_SAME_JOB, "1000", *places, *on, env=ENVIRONMENT, new=True) as job:
        for _ in range(_KILLS):
            version = _until_version(job, 60)  # its master has a checkpoint to go on from
            os.kill(cluster.processes(role)[0], signal.SIGKILL)
            began = time.monotonic()
            if role == "worker":  # what was on its way may have made one more version
                _until_version(job, version + 2)
            else:
                until(lambda: len(_resumed(job)) > len(took), _RAY_LIMIT_S)
                _until_version(job, _resumed(job)[-1] + 1)
            took.append(time.monotonic() - began)
        job.signal(signal.SIGINT)
        job.wait(_RAY_LIMIT_S)
    return took


def _resumed(job: Running) -> list[int]:
    """The versions at which its masters went on."""
    return [int(version.replace(",", "")) for version in re.findall(r"resuming at version ([\d,]+)", job.out)]


def _until_version(job: Running, version: int) -> int:
    """The version of the job once it has reached one."""
    found = 0

    def reached() -> bool:
        nonlocal found
        assert job.process.poll() is None, f"{job.out}\n{job.err}"
        masters = re.findall(r"master at (\S+), store", job.out)
        with suppress(ElastableError), MasterClient(masters[-1] if masters else "127.0.0.1:1", 2.0) as master:
            found = master.status().version
        return found >= version

    until(reached, _RAY_LIMIT_S)
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["ray"]:
        on_ray()
    else:
        main(tuple(map(int, sys.argv[1:])) or _TABLES)
