"""Batches of training triples, and the candidates that they are scored with."""

from __future__ import annotations

from elastable.replicas.knowledge_graphs.sampling.negatives import AllEntities, NegativeSampler, TripleNegatives
from elastable.replicas.knowledge_graphs.sampling.random_negatives import (
    AugmentedNegatives,
    RandomNegatives,
    TypedNegatives,
)
from elastable.replicas.knowledge_graphs.sampling.samplers import (
    RandomSampler,
    RigidSampler,
    ShardedSampler,
    frequency_weights,
)

__all__ = [
    "AllEntities",
    "AugmentedNegatives",
    "NegativeSampler",
    "RandomNegatives",
    "RandomSampler",
    "RigidSampler",
    "ShardedSampler",
    "TripleNegatives",
    "TypedNegatives",
    "frequency_weights",
]
