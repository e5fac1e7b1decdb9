"""Store servers on the wire: their calls, whoever makes them, and whoever answers."""

__all__ = ["push_messages", "remote_store", "shard_service"]
