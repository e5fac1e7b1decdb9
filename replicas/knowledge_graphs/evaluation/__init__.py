"""Ranks true answers among all entities."""

__all__ = ["classification", "evaluation"]
