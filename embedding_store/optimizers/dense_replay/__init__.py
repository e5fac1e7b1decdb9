"""Rows that follow every step, as Keras' dense ones do, and are caught up when they are next touched or read."""

__all__ = ["steps_at", "table_steps"]
