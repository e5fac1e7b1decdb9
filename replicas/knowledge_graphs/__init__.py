"""Balanced entity sampling and sharing (BESS): knowledge graphs over a replica group."""

__all__ = [
    "evaluation",
    "graph_run",
    "graph_settings",
    "graph_trainer",
    "losses",
    "ranking",
    "samplers",
    "schemes",
    "trained_graph",
]
