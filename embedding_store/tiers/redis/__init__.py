"""Rows in Redis or Valkey, on one node or a Cluster."""

__all__ = ["redis_place", "redis_tier", "schema", "url"]
