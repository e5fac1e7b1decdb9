"""Tables whose rows are also kept in a tier: hot rows in memory, changed rows written behind."""

__all__ = ["flusher", "store_state", "store_tier", "tier_records"]
