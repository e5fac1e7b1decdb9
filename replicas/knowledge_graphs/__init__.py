"""Balanced entity sampling and sharing (BESS): knowledge graphs over a replica group."""

__all__ = [
    "candidate_losses",
    "evaluation",
    "graph_run",
    "graph_settings",
    "graph_trainer",
    "losses",
    "negatives",
    "rank_report",
    "samplers",
    "trained_graph",
    "whole_losses",
]
