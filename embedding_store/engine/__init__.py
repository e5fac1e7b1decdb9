"""The store in memory: tables, lookups, commits."""

from __future__ import annotations

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.pins import MemoryPin, PinKeeper
from elastable.embedding_store.engine.store_history import DEFAULT_LOG_BYTES, ReplayedTables, StoreHistory
from elastable.embedding_store.engine.table_rows import resident_rows
from elastable.embedding_store.engine.tiered.flusher import DEFAULT_EVERY_S
from elastable.embedding_store.engine.tiered.store_state import FlushedTable, StoreState
from elastable.embedding_store.engine.tiered.store_tier import StoreTier
from elastable.embedding_store.engine.tiered.tier_records import RecordLayout, RowParts

__all__ = [
    "DEFAULT_EVERY_S",
    "DEFAULT_LOG_BYTES",
    "FlushedTable",
    "MemoryPin",
    "MemoryStore",
    "MemoryTable",
    "PinKeeper",
    "RecordLayout",
    "ReplayedTables",
    "RowParts",
    "StoreHistory",
    "StoreState",
    "StoreTier",
    "resident_rows",
]
