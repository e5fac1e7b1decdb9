"""Score functions of knowledge-graph embeddings, by name."""

from __future__ import annotations

from elastable.replicas.knowledge_graphs.scores.catalogue import SCORES, RowPart, row_layout, score_function
from elastable.replicas.knowledge_graphs.scores.functions import ScoreFunction, Values

__all__ = ["SCORES", "RowPart", "ScoreFunction", "Values", "row_layout", "score_function"]
