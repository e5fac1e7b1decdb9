"""A memory store's rows, read by other processes of its host without a copy."""

__all__ = ["attachment", "shared_channel", "shared_source", "shared_store"]
