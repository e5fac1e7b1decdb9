"""Processes that serve rows for a job: store servers, and the settings of all commands that serve."""

__all__ = ["finding", "store_registry"]
