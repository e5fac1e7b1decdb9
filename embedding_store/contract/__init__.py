"""What everything below and above agrees on: arrays, specs, rows, commits, stores, pins."""

__all__ = ["arrays", "malformed", "row_data", "row_source", "snapshot", "spec", "store", "tier"]
