"""Elastable's tables in Redis: lookups, writes, and commits that read, apply and write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import count, cycle
from typing import Any

import numpy as np

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.process.heap import keep_freed_memory

__all__ = ["NOTHING_HELD", "filled_store", "prepare"]

NOTHING_HELD = "redis commit, nothing held"
_OUTPUTS = 4  # in rotation, so that none is still in a cache


def prepare(race: str, settings: Mapping[str, Any]) -> Turn:
    """`redis lookup`, `redis write`, `redis commit` (Adagrad), `redis commit, nothing held` (which reads every row)."""
    keep_freed_memory()  # as every process of the `elastable` command does
    store = filled_store(race, settings)
    batches = workloads.redis_ids(settings["rows"], settings["batch"])
    make = {"redis lookup": _lookups, "redis write": _writes}.get(race, _commits)
    rows = np.random.default_rng(2).standard_normal((settings["batch"], workloads.DIM), np.float32)
    return Turn(f"elastable {version('elastable')}", make(store, batches, rows), settings["batch"])


def filled_store(race: str, settings: Mapping[str, Any]) -> RedisStore:
    """A store of the race's own whose table "t" has all its rows; with Adagrad's slots for commits."""
    commits = race.startswith("redis commit")
    namespace = f"{race.replace(' ', '-').replace(',', '')}-{os.getpid()}"  # sides share a server
    held = "&held_bytes=0" if race == NOTHING_HELD else ""
    store = RedisStore(
        f"redis://{settings['address']}?partitions={settings['partitions']}&namespace={namespace}&deadline=60{held}"
    )
    optimizer = OptimizerSpec.of("adagrad" if commits else "sgd", learning_rate=0.01)
    store.create_table(TableSpec("t", workloads.DIM, settings["rows"], optimizer=optimizer))
    rows = np.random.default_rng(1).standard_normal((settings["rows"], workloads.DIM), np.float32)
    slots = np.ones((len(rows), workloads.DIM if commits else 0), np.float32)
    store.put("t", [RowBlock(np.arange(len(rows)), rows, slots)])
    return store


def _lookups(store: RedisStore, batches: list[Int64], rows: Float32) -> Callable[[], object]:
    turns, table = cycle(batches), store.table("t")
    outputs = cycle([np.empty_like(rows) for _ in range(_OUTPUTS)])
    return lambda: table.lookup(next(turns), next(outputs))


def _writes(store: RedisStore, batches: list[Int64], rows: Float32) -> Callable[[], object]:
    turns = cycle(batches)
    slots = np.empty((len(rows), 0), np.float32)
    return lambda: store.put("t", [RowBlock(next(turns), rows, slots)])


def _commits(store: RedisStore, batches: list[Int64], rows: Float32) -> Callable[[], object]:
    turns, versions = cycle(batches), count(store.version() + 1)

    def commit() -> None:
        number = next(versions)
        store.commit(Commit(number, {"t": TableUpdate(next(turns), rows)}, number - 1, {}))

    return commit
