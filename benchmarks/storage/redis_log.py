"""How fast Redis' append-only file grows under a training job, and how long a server takes to load it.

An epoch in the shape of examples/flights: 300,000 records, 1,024 per version, one row of 8 values with its Adagrad
slots from each of 15 tables, ids as skewed as those of flights, a record of 64 KiB. Once without a limit on the
file, and once with the limits of docker-compose.yml. The store is closed after the epoch, so everything is flushed,
and the server has ended the rewriting that this may begin. The file is compared with that of the release before logs,
which wrote every row field by field.

    python -m benchmarks.storage.redis_log
"""

import time
from dataclasses import dataclass

import numpy as np
import redis

from benchmarks.harness import Row, compare, publish
from benchmarks.processes import redis_server
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.open_store import open_store
from elastable.process.heap import keep_freed_memory
from tests.servers import Server

_FILE = ("--appendonly", "yes", "--appendfsync", "everysec")
COMPOSE_LIMITS = ("--auto-aof-rewrite-percentage", "100", "--auto-aof-rewrite-min-size", "1gb")
COMPOSE_REDIS = (*_FILE, *COMPOSE_LIMITS)
_NO_LIMIT = (*_FILE, "--auto-aof-rewrite-percentage", "0", "--rename-command", "BGREWRITEAOF", "")
_TABLES, _IDS, _DIM, _RECORDS, _BATCH = 15, 300_000, 8, 300_000, 1_024
_RECORD = bytes(1 << 16)
_LOAD_S = 300.0
_BEFORE_MB, _PART = 691.0, 4.0  # of one epoch before logs, without a limit; at most one part in so many is left


@dataclass(frozen=True, slots=True)
class _Measured:
    """One epoch: commits, rows they changed, bytes they added to the file, its bytes at the end, seconds to load it."""

    versions: int
    rows: int
    appended: int
    left: int
    loading_s: float


def main() -> None:
    """Measures, prints and writes `results/redis_log.json`."""
    plain, limited = map(_epoch, (_NO_LIMIT, COMPOSE_REDIS))
    beside = "as in docker-compose.yml, and with no limit"
    changed = plain.rows * 2 * 4 * _DIM / plain.versions
    a_version = plain.appended / plain.versions
    rows = [
        Row("append-only file, per version, vs. its rows and slots", a_version, "bytes", changed, changed / a_version),
        Row("append-only file, a row of 8 values and its slots", plain.appended / plain.rows, "bytes"),
        compare(f"file after the epoch, {beside}", "MB", [limited.left / 1e6], [plain.left / 1e6], less=True),
        compare(f"loading it, {beside}", "s", [limited.loading_s], [plain.loading_s], less=True),
    ]
    name = "file after the epoch, as in docker-compose.yml, against that of the release before logs"
    rows.append(compare(name, "MB", [limited.left / 1e6], [_BEFORE_MB], _PART, less=True))
    publish("redis_log", f"{plain.versions} versions, {plain.rows // plain.versions:,} rows x {_DIM} each", rows)


def _epoch(options: tuple[str, ...]) -> _Measured:
    with redis_server(*options) as server:
        versions, rows, appended = _train(server)
        _await_rewriting(server)
        server.kill()
        left = sum(file.stat().st_size for file in server.directory.glob("appendonlydir/*"))
        return _Measured(versions, rows, appended, left, _loading(server))


def _train(server: Server) -> tuple[int, int, int]:
    """One epoch; versions, rows that they changed, bytes that they added to the file, if it was not rewritten."""
    random = np.random.default_rng(2026)
    names = [f"t{number}" for number in range(_TABLES)]
    versions, rows = _RECORDS // _BATCH, 0
    with open_store(f"{server.url}?deadline=120") as store:
        for name in names:
            store.create_table(TableSpec(name, _DIM, None, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.01)))
        before = _appended(server)
        for version in range(versions):
            updates = {}
            for name in names:
                ids = np.unique((_IDS * random.random(_BATCH) ** 4).astype(np.int64))
                updates[name] = TableUpdate(ids, np.ones((len(ids), _DIM), np.float32))
                rows += len(ids)
            store.commit(Commit(version + 1, updates, version, {}, _RECORD))
    return versions, rows, _appended(server) - before


def _appended(server: Server) -> int:
    with server.client() as client:
        return int(client.info("persistence")["aof_current_size"])


def _await_rewriting(server: Server) -> None:
    with server.client() as client:
        while any(client.info("persistence")[f"aof_rewrite_{what}"] for what in ("in_progress", "scheduled")):
            time.sleep(0.02)


def _loading(server: Server) -> float:
    """Seconds from the start of the server to its first answer."""
    began = time.perf_counter()
    server.launch()
    with server.client() as client:
        while time.perf_counter() - began < _LOAD_S:
            try:
                client.ping()
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                time.sleep(0.02)
            else:
                return time.perf_counter() - began
    raise SystemExit(f"the server has not loaded its file within {_LOAD_S:g} s")


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    main()
