"""Replica groups: workers that exchange arrays by collectives, without a master."""

__all__ = ["group", "replica_grouping", "thread_group"]
