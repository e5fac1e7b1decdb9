"""Data-parallel training whose dense variables and optimizer state are shared over replicas."""

__all__ = ["trainer"]
