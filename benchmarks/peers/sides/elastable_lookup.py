"""Elastable's tables in memory: lookups of ids, of bags, and of a dynamic table."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.lookup import filled_table, look_up
from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from elastable.heap import keep_freed_memory
from embedding_store.memory import MemoryStore

__all__ = ["prepare"]


def prepare(race: str, settings: Mapping[str, Any]) -> Turn:
    """`lookup`: rows of ids. `bags`: sums of bags. `dynamic`: rows of a table of any int64 ids."""
    keep_freed_memory()  # as every process of the `elastable` command does
    if race == "dynamic":
        ids, batches = workloads.dynamic_ids()
    else:
        ids = np.arange(workloads.ROWS)
        batches = {"lookup": workloads.uniform, "bags": workloads.bags}[race]()
    table = filled_table(MemoryStore(workloads.THREADS), ids, race == "dynamic")
    work = look_up(table, batches, "sum" if race == "bags" else None)
    return Turn(f"elastable {version('elastable')}", work, batches[0].size)
