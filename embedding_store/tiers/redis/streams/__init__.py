"""The write-ahead log of a store as a Redis Stream."""

__all__ = ["redis_log"]
