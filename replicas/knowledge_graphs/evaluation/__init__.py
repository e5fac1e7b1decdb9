"""Ranks of true answers among all entities."""
