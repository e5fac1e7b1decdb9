"""Replica groups: workers that exchange arrays by collectives, without a master."""

__all__ = ["agreement", "group", "grouping", "thread_group"]
