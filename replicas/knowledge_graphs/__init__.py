"""Balanced entity sampling and sharing (BESS): knowledge graphs over a replica group."""

__all__ = ["graph_settings"]
