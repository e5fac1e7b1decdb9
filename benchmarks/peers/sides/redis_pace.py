"""The server ceiling of Redis, with Elastable's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from benchmarks.peers.sides.elastable_redis import filled_store
from benchmarks.redis_pace import commit_pace, lookup_pace, write_pace
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.schema_1 import TableRecord

__all__ = ["prepare"]


def prepare(race: str, settings: Mapping[str, Any]) -> Turn:
    """`redis lookup`, `redis write` or `redis commit`: their traffic."""
    with filled_store(race, settings) as store:
        url, spec = store.url, store.specs()["t"]
    catalog = Catalog.of(url.namespace, [TableRecord(spec, settings["partitions"])])
    batches = workloads.redis_ids(settings["rows"], settings["batch"])
    if race == "redis commit":
        work = commit_pace(url, catalog, batches, workloads.DIM)
    else:
        work = {"redis lookup": lookup_pace, "redis write": write_pace}[race](url, catalog, batches)
    return Turn("redis-server", work, settings["batch"])
