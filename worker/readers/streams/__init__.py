"""Streams of events: partitions with positions, from which a master cuts versions, and workers read spans."""

__all__ = ["event_reader", "folder_reader", "kafka_reader", "redis_stream_reader"]
