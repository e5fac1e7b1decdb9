"""The live page: what it shows, and how that gets to a browser."""

__all__ = ["views"]
