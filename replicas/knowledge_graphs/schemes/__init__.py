"""Schemes: how triples and candidates on different workers are brought together to be scored."""

from elastable.replicas.knowledge_graphs.schemes.candidate_losses import (
    Dropout,
    EmbeddingMoving,
    Scheme,
    Scored,
    ScoreMoving,
    StepGradients,
)
from elastable.replicas.knowledge_graphs.schemes.whole_losses import KvsAll, WholeSoftmax, distinct_queries

__all__ = [
    "Dropout",
    "EmbeddingMoving",
    "KvsAll",
    "Scheme",
    "ScoreMoving",
    "Scored",
    "StepGradients",
    "WholeSoftmax",
    "distinct_queries",
]
