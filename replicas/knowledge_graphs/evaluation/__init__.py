"""Ranks true answers among all entities."""
