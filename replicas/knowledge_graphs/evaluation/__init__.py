"""Ranks true answers among all entities."""

from __future__ import annotations

from elastable.replicas.knowledge_graphs.evaluation.classification import (
    ClassificationMetrics,
    Thresholds,
    best_threshold,
)
from elastable.replicas.knowledge_graphs.evaluation.evaluation import (
    HITS,
    AllScores,
    Candidates,
    Evaluation,
    QueryBatches,
    QueryRanks,
    TripleCandidates,
    as_asked,
)
from elastable.replicas.knowledge_graphs.evaluation.ranking import RankCounts, RankingMetrics, Ranks

__all__ = [
    "HITS",
    "AllScores",
    "Candidates",
    "ClassificationMetrics",
    "Evaluation",
    "QueryBatches",
    "QueryRanks",
    "RankCounts",
    "RankingMetrics",
    "Ranks",
    "Thresholds",
    "TripleCandidates",
    "as_asked",
    "best_threshold",
]
