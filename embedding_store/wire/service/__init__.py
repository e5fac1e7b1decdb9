"""A store served to other processes."""

__all__ = ["pin_service", "store_service"]
