"""Elastable's tier in Redis: records read, and records flushed, with Adagrad's slots next to the weights or without."""

import os
from collections.abc import Callable
from importlib.metadata import version
from itertools import count, cycle

import numpy as np

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.contract.tier import Records, TierTable
from elastable.embedding_store.tiers.redis.record_transfer import RecordTable
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.url import RedisUrl
from elastable.process.heap import keep_freed_memory

_OUTPUTS = 4  # in rotation, so that none is still in a cache


def prepare(race: str, settings: DocumentFields) -> Turn:
    """`redis lookup`, `redis write`, `redis flush` (weights and Adagrad's slots)."""
    keep_freed_memory()  # as every process of the `elastable` command does
    tier, _, table = filled_tier(race, settings)
    batches = workloads.redis_ids(settings["rows"], settings["batch"])
    make = _lookups if race == "redis lookup" else _writes
    work = make(tier, batches, settings["batch"], table.table.record_bytes)
    return Turn(f"elastable {version('elastable')}", work, settings["batch"])


def filled_tier(race: str, settings: DocumentFields) -> tuple[RedisTier, RedisUrl, RecordTable]:
    """A tier of the race's own whose table "t" has all its records; with Adagrad's slots for flushes."""
    namespace = f"{race.replace(' ', '-')}-{os.getpid()}"  # sides share a server
    url = RedisUrl.parse(
        f"redis://{settings['address']}?partitions={settings['partitions']}&namespace={namespace}&deadline=60"
    )
    tier = RedisTier(url)
    values = workloads.DIM * (2 if race == "redis flush" else 1)
    table = TierTable("t", 4 * values)
    tier.drop("t")
    tier.create(table)
    ids = np.arange(settings["rows"], dtype=np.int64)
    rows = np.random.default_rng(1).standard_normal((len(ids), values), np.float32)
    tier.write([Records("t", ids, ids, rows.view(np.uint8))], {}, 1)
    return tier, url, RecordTable.of(namespace, table, settings["partitions"])


def _lookups(tier: RedisTier, batches: list[Int64], batch: int, record_bytes: int) -> Callable[[], object]:
    turns, positions = cycle(batches), np.arange(batch)
    outputs = cycle([np.empty((batch, record_bytes), np.uint8) for _ in range(_OUTPUTS)])
    return lambda: tier.read([Records("t", next(turns), positions, next(outputs))])


def _writes(tier: RedisTier, batches: list[Int64], batch: int, record_bytes: int) -> Callable[[], object]:
    turns, sequences, positions = cycle(batches), count(2), np.arange(batch)
    rows = np.random.default_rng(2).integers(0, 256, (batch, record_bytes), dtype=np.uint8)
    return lambda: tier.write([Records("t", next(turns), positions, rows)], {}, next(sequences))
