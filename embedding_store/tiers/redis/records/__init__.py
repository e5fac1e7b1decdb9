"""Records of tables in Redis: requests and replies in bulk, the registry of tables, and the state kept with them."""

__all__ = ["record_transfer", "tier_registry"]
