"""Rows and logs in Redis or Valkey, on one node or a Cluster."""

__all__ = ["connection", "redis_log", "redis_place", "redis_tier", "reply_shapes", "schema", "topology", "url"]
