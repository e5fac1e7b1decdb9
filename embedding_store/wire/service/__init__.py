"""A store served to other processes."""

__all__ = ["store_service"]
