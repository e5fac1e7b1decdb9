"""Whole jobs by where their tables are: in memory, with a log, in files, in Redis.

The click model (26 tables of together a million rows, Zipf(1.05) or uniform ids) and examples/flights with one worker
and two. All stores of a job take turns; the others are stopped. Redis is a server with an append-only file, as
docker-compose.yml starts it. The job in memory also takes turns beside a program that writes as many bytes a version
as the log of another store gets (`benchmarks.jobs.bytes_beside`), which shows what these bytes cost by themselves. A
version's latency is the time from the version before until a client that waits for it is answered. Its processor time
is that of master, workers and server together: it says what a store costs where other programs keep the cores busy.

    python -m benchmarks.jobs.stores [click] [flights] [more] [STORE ...]

`more` adds SGD and Adam to the click model. A STORE is another URL to measure, `{home}` in it a new folder, `{redis}`
the address of the server.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.click_job.contender import ready
from benchmarks.click_job.contenders import Job, click_job
from benchmarks.harness import Row, compare, interleaved, publish
from benchmarks.processes import processor_s, redis_server
from benchmarks.storage.redis_log import COMPOSE_REDIS
from elastable.embedding_store.wire.remote_source import RemoteSource
from tests.servers import Server

_ROWS, _TABLES = 1_000_000, 26
_ROUNDS, _SECONDS = 5, 1.5
_FLIGHTS = Path(__file__).parents[2] / "examples" / "flights" / "model.py"
_MICRO_BATCH, _MICRO_BATCHES = 512, 2
_EPOCHS = 1_000  # more than a benchmark sees
_WARM = 300  # versions: more than an epoch, in which most rows are first touches
_MEMORY = "memory"
_LOGGED = "memory?log={home}&fsync=interval"
_FILES = "file://{home}?budget=64MiB"
_REDIS = "redis://{redis}?deadline=120"
_NAMES = {_LOGGED: "memory and a log", _FILES: "files, 64 MiB in memory", _REDIS: "Redis"}
_WAIT_S = 60.0

_Start = Callable[[str, Path, Sequence[str]], Job]
"""Makes the job of a name, with a folder and options of the master."""


@dataclass(frozen=True, slots=True)
class _Race:
    """One job over several stores.

    Attributes:
        name: For the rows.
        start: Makes it.
        floors: Store -> the least part of memory's examples/s; None: shown and no more.
        latency: Whether versions' latencies have floors: p50 against memory's, p99 against their own p50.
    """

    name: str
    start: _Start
    floors: Mapping[str, float | None]
    latency: bool = False


@dataclass(slots=True)
class _Turns:
    """A job that also notes when versions come.

    Attributes:
        job: The job.
        redis: Its Redis, if it has one.
        log: The folder of its log, if it has one.
        gaps: Seconds between versions, of all turns.
        processor_us: Microseconds of processor time a version, of each turn.
    """

    job: Job
    redis: Server | None = None
    log: Path = Path()
    gaps: list[float] = field(default_factory=list)
    processor_us: list[float] = field(default_factory=list)

    def turn(self, seconds: float) -> float:
        """Examples/s of a turn."""
        with self.job.running(), RemoteSource(self.job.address, deadline_s=_WAIT_S) as source:
            time.sleep(0.3)  # caches that others have filled meanwhile
            stamps: list[float] = []
            version = source.version()
            first, used = version, self._processor_s()
            end = time.perf_counter() + seconds
            while len(stamps) < 2 or stamps[-1] < end:  # an evaluation takes longer than a turn
                version += 1
                self._wait(source, version)
                stamps.append(time.perf_counter())
            self.processor_us.append(1e6 * (self._processor_s() - used) / (version - first))
        self.gaps += np.diff(stamps).tolist()
        return self.job.examples * (len(stamps) - 1) / (stamps[-1] - stamps[0])

    def _processor_s(self) -> float:
        server = self.redis.process if self.redis else None
        return processor_s(each.pid for each in (*self.job.processes, server) if each is not None)

    def logged_bytes(self) -> int:
        """Bytes that Redis has received, or that a log in files has had so far, if none of them went yet."""
        if self.redis is None:
            return sum(path.stat().st_size for path in self.log.glob("*.log"))
        with self.redis.client() as client:
            return int(client.info("stats")["total_net_input_bytes"])

    def _wait(self, source: RemoteSource, version: int) -> None:
        late = time.perf_counter() + _WAIT_S
        while not source.wait_for_version(version, _WAIT_S):
            if time.perf_counter() > late:
                raise RuntimeError(f"{self.job.name}: no version {version} within {_WAIT_S:g} s")
            time.sleep(0.001)  # nothing notifies its store of commits


def main(arguments: Sequence[str]) -> None:
    """Measures, prints and writes `results/stores.json`."""
    stores = [argument for argument in arguments if argument not in ("click", "flights", "more")]
    races = _races("more" in arguments, stores)
    wanted = [name for name in ("click", "flights") if name in arguments] or ["click", "flights"]
    rows = [row for race in races if race.name.startswith(tuple(wanted)) for row in _run(race)]
    publish("stores", "Whole jobs, by where their tables are", rows)


def _races(more: bool, stores: Sequence[str]) -> list[_Race]:
    others = dict.fromkeys(stores)

    def click(optimizer: str, ids: str) -> _Start:
        return lambda name, home, options: click_job(
            name, _ROWS, optimizer, home, options, threads=2, ids=ids, tables=_TABLES
        )

    def flights(workers: int) -> _Start:
        return lambda name, home, options: _flights_job(name, home, options, workers)

    races = [
        _Race("click, Adagrad, Zipf(1.05) ids", click("Adagrad", "zipf"), {_LOGGED: 0.9, _FILES: None, _REDIS: 0.8}),
        _Race("click, Adagrad, uniform ids", click("Adagrad", "uniform"), {_LOGGED: None, _REDIS: 0.4}),
    ]
    if more:
        races += [
            _Race(f"click, {optimizer}, Zipf(1.05) ids", click(optimizer, "zipf"), {_LOGGED: None, _REDIS: None})
            for optimizer in ("SGD", "Adam")
        ]
    races += [
        _Race("flights, 1 worker", flights(1), {_LOGGED: 0.9, _REDIS: 0.85}, latency=True),
        _Race("flights, 2 workers", flights(2), {_REDIS: 0.85}, latency=True),
    ]
    return [_Race(race.name, race.start, {**race.floors, **others}, race.latency) for race in races]


def _flights_job(name: str, home: Path, options: Sequence[str], workers: int) -> Job:
    """The main job of the README: 1,024 records a version, of each worker a part."""
    job = ["--micro-batch-size", str(_MICRO_BATCH), "--grads-to-wait", str(_MICRO_BATCHES), "--epochs", str(_EPOCHS)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return Job(name, _FLIGHTS, _MICRO_BATCH * _MICRO_BATCHES, [*job, *options], home, environment, workers, _WARM)


def _run(race: _Race) -> list[Row]:
    with ExitStack() as held:
        home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="stores-")))
        jobs: dict[str, _Turns] = {}
        for number, url in enumerate([_MEMORY, *race.floors]):
            place = home / str(number)
            place.mkdir()
            server = held.enter_context(redis_server(*COMPOSE_REDIS)) if "{redis}" in url else None
            store = url.replace("{home}", str(place / "store")).replace("{redis}", server.address if server else "")
            jobs[url] = _Turns(race.start(f"job-{number}", place, ["--store", store]), server, place / "store")
        held.enter_context(ready(*(turns.job for turns in jobs.values())))
        limits = _limits(race, home, jobs, held)
        jobs.update(limits)
        figures = interleaved({url: partial(turns.turn, _SECONDS) for url, turns in jobs.items()}, _ROUNDS)
    for url, of in figures.items():
        print(f"{race.name}, {url}: {' '.join(f'{figure:,.0f}' for figure in of)}", flush=True)
    rows = []
    for url, floor in race.floors.items():
        name = f"{race.name}, {_NAMES.get(url, url)}"
        rows.append(compare(f"{name}, against memory", "examples/s", figures[url], figures[_MEMORY], floor))
        what = f"{name}, processor time of a version, against memory's"
        rows.append(compare(what, "us", jobs[url].processor_us, jobs[_MEMORY].processor_us))
        rows += _latency(name, jobs[url].gaps, jobs[_MEMORY].gaps, race.latency and url == _REDIS)
    for what in limits:
        rows.append(compare(f"{race.name}, {what}, against memory", "examples/s", figures[what], figures[_MEMORY]))
    return rows


def _limits(race: _Race, home: Path, jobs: Mapping[str, _Turns], held: ExitStack) -> dict[str, _Turns]:
    """Jobs in memory beside programs that write what the logs of others get; by what a row is called."""
    limits: dict[str, _Turns] = {}
    for url in (_LOGGED, _REDIS):
        if race.floors.get(url) is None or race.latency:
            continue
        turns = jobs[url]
        with turns.job.running():
            version, before = turns.job.version(), turns.logged_bytes()
            time.sleep(_SECONDS)
            size = (turns.logged_bytes() - before) // (turns.job.version() - version)
        kind = "redis" if url == _REDIS else "files"
        folder = home / f"beside-{kind}"
        folder.mkdir()
        place = turns.redis.address if turns.redis else str(folder / "log")
        (job,) = held.enter_context(ready(race.start(f"beside-{kind}", folder, ["--store", "memory"])))
        command = [sys.executable, "-m", "benchmarks.jobs.bytes_beside", job.address, str(size), kind, place]
        job.processes.append(subprocess.Popen(command))
        what = f"in memory, beside a program that writes what the log of {_NAMES[url]} gets"
        limits[what] = _Turns(job, turns.redis)
        print(f"{race.name}, {_NAMES[url]}: {size / 1e6:.2f} MB a version", flush=True)
    return limits


def _latency(name: str, gaps: Sequence[float], memory: Sequence[float], floors: bool) -> list[Row]:
    """Of a version: p50 against memory's, p99 against its own p50."""
    middle, late = (1e6 * float(np.quantile(gaps, share)) for share in (0.5, 0.99))
    theirs = 1e6 * float(np.quantile(memory, 0.5))
    least = (round(1 / 1.3, 2), 0.5) if floors else (None, None)
    return [
        Row(f"{name}, p50 of a version, against memory's", middle, "us", theirs, theirs / middle, least[0]),
        Row(f"{name}, p99 of a version, against its p50", late, "us", middle, middle / late, least[1]),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
