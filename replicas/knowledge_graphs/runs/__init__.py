"""Training runs: their loop, and their checkpoints."""

__all__ = ["graph_checkpoints", "graph_run"]
