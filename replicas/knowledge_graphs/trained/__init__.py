"""A trained model, loaded once: ranks, scores, answers, and its embeddings in files."""

from __future__ import annotations

from elastable.replicas.knowledge_graphs.trained.rank_report import (
    CATEGORIES,
    rank_groups,
    read_triple_candidates,
    relation_categories,
    save_ranks,
)
from elastable.replicas.knowledge_graphs.trained.trained_graph import (
    Answer,
    LinkPredictor,
    Query,
    TrainedGraph,
    export_embeddings,
)

__all__ = [
    "CATEGORIES",
    "Answer",
    "LinkPredictor",
    "Query",
    "TrainedGraph",
    "export_embeddings",
    "rank_groups",
    "read_triple_candidates",
    "relation_categories",
    "save_ranks",
]
