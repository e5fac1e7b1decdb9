"""Training runs: their loop, and their checkpoints."""

from __future__ import annotations

from elastable.replicas.knowledge_graphs.training.graph_checkpoints import (
    GraphCheckpoint,
    GraphCheckpoints,
    RunProgress,
)
from elastable.replicas.knowledge_graphs.training.graph_run import GraphRun, train_graph

__all__ = ["GraphCheckpoint", "GraphCheckpoints", "GraphRun", "RunProgress", "train_graph"]
