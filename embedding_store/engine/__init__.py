"""The store in memory: tables, lookups, commits; its log with the rows that it starts from (`store_history`)."""

__all__ = ["memory_store", "memory_table", "pins", "store_history", "store_tier"]
