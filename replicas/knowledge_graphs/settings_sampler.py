"""The sampler that a training run's settings ask for."""

from __future__ import annotations

from elastable.replicas.knowledge_graphs.graph.batch import Int32
from elastable.replicas.knowledge_graphs.graph.frequency import frequency_weights
from elastable.replicas.knowledge_graphs.graph.known_triples import KnownTriples
from elastable.replicas.knowledge_graphs.graph.partition import PartitionedTriples
from elastable.replicas.knowledge_graphs.graph.sharding import Sharding
from elastable.replicas.knowledge_graphs.sampling.negatives import NegativeSampler
from elastable.replicas.knowledge_graphs.sampling.random_negatives import RandomNegatives, TypedNegatives
from elastable.replicas.knowledge_graphs.sampling.random_sampler import RandomSampler
from elastable.replicas.knowledge_graphs.sampling.rigid_sampler import RigidSampler
from elastable.replicas.knowledge_graphs.sampling.sampler import ShardedSampler
from elastable.replicas.knowledge_graphs.settings import WHOLE_SOFTMAX, TrainSettings

__all__ = ["sampler_of"]


def sampler_of(settings: TrainSettings, sharding: Sharding, triples: Int32, relations: int) -> ShardedSampler:
    """Batches of a run, with candidates where its loss needs them.

    Args:
        settings: Of the run.
        sharding: Of the entities.
        triples: int32 `[N, 3]`, global ids, inverse ones included.
        relations: How many there are, inverse ones included.
    """
    partition = PartitionedTriples.create(triples, sharding)
    kind: type[ShardedSampler] = RandomSampler if settings.sampling == "random" else RigidSampler
    return kind(
        partition,
        -(-settings.batch // sharding.shards),
        seed=settings.seed,
        negatives=None if settings.loss == WHOLE_SOFTMAX else _negatives(settings, sharding, triples, relations),
        weights=frequency_weights(partition.triples) if settings.weighting == "frequency" else None,
    )


def _negatives(settings: TrainSettings, sharding: Sharding, triples: Int32, relations: int) -> NegativeSampler:
    known = KnownTriples.create(sharding.entities, relations, triples) if settings.filtered else None
    kind: type[NegativeSampler] = TypedNegatives if settings.candidates == "typed" else RandomNegatives
    return kind(
        sharding,
        -(-settings.negatives // sharding.shards),
        corruption=settings.ends,
        shared=settings.shared,
        seed=settings.seed,
        exclude="known" if settings.filtered else "nothing",
        known=known,
        mask_of_all=settings.filtered and settings.shared and settings.scheme == "score-moving",
    )
