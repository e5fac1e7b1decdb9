"""Stores on the wire and in shared memory: messages, channels, clients, servers."""

__all__ = ["remote_source"]
