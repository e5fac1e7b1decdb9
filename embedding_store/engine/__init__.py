"""The store in memory: tables, lookups, commits."""

__all__ = ["memory_store", "memory_table", "pins", "store_history", "store_tier"]
