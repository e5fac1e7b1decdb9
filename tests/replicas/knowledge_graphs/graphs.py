"""Small graphs for the tests, and what all workers' batches of a step say together."""

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int32, Int64
from elastable.replicas.knowledge_graphs.graph.batch import Side, StepBatch
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.samplers import ShardedSampler
from elastable.replicas.knowledge_graphs.scores.functions import ScoreFunction

ENTITIES, RELATIONS, SHARDS = 501, 11, 5
TYPE_OFFSETS = [0, 20, 60, 200, 341, 342]  # the peer's own test of its sharding: bess-kge, tests/test_sharding.py


def random_triples(count: int = 2000, seed: int = 7) -> Int32:
    """Triples of 501 entities and 11 relations, each once."""
    rng = np.random.default_rng(seed)
    draw = [rng.integers(high, size=2 * count) for high in (ENTITIES, RELATIONS, ENTITIES)]
    return rng.permutation(np.unique(np.stack(draw, 1), axis=0))[:count].astype(np.int32)


def typed_sharding(shards: int = SHARDS, seed: int = 1) -> Sharding:
    """501 entities of six types, one of which has one entity only."""
    types = np.searchsorted(TYPE_OFFSETS, np.arange(ENTITIES), side="right") - 1
    return Sharding.create(ENTITIES, shards, seed=seed, entity_types=types)


def named(graph: KnowledgeGraph, split: str) -> list[tuple[str, str, str]]:
    triples = getattr(graph, split).tolist()
    return [(graph.entities[h], graph.relations[r], graph.entities[t]) for h, r, t in triples]


def is_known(known: KnownTriples, triples: Int32) -> Bools:
    """Whether each of `triples` is known: bool `[N]`."""
    first, last = known.tails.spans(triples[:, 0], triples[:, 1])
    spans = zip(first, last, triples[:, 2], strict=True)
    return np.array([tail in known.tails.answers[start:stop] for start, stop, tail in spans], np.bool_)


def run_epoch(trainer: GraphTrainer) -> float:
    """Takes the steps of an epoch; the mean loss of its triples."""
    steps = [trainer.run_step() for _ in range(trainer.steps_per_epoch)]
    return sum(loss * present for loss, present in steps) / sum(present for _, present in steps)


def everyones(sampler: ShardedSampler, step: int) -> list[StepBatch]:
    return [sampler.batch(step, worker) for worker in range(sampler.partition.sharding.shards)]


def assembled(partition: PartitionedTriples, batches: list[StepBatch]) -> Int64:
    """The triples of a step as the workers see them after their all-to-all of tails: int64 `[n, n, p, 3]`.

    From rows alone, so that a wrong row of a head or a tail is another triple.
    """
    entity_at = partition.sharding.entity_at
    n, p = batches[0].head.shape
    seen = np.empty((n, n, p, 3), np.int64)
    for worker, batch in enumerate(batches):
        seen[worker, :, :, 0] = entity_at[worker, batch.head]
        seen[worker, :, :, 1] = batch.relation
        for other in range(n):  # row `worker` of what shard `other` sends comes to `worker`, at row `other`
            seen[worker, other, :, 2] = entity_at[other, batches[other].tail[worker]]
    return seen


def received(sharding: Sharding, batches: list[StepBatch], worker: int) -> Int64:
    """What a worker's triples are scored with after the all-to-all, from the rows alone: int64 `[B, n, m]`."""
    drawn = [batch.negatives for batch in batches]
    rows = [each.rows[worker] for each in drawn if each is not None]
    return np.stack([sharding.entity_at[shard][row] for shard, row in enumerate(rows)], axis=1)


def replaced_ends(batch: StepBatch) -> Int64:
    """The column that candidates replace, 0 (head) or 2 (tail), of each of a worker's triples: int64 `[n * p]`."""
    assert batch.negatives is not None
    n, p = batch.head.shape
    k = np.arange(n * p) % p
    return {"h": 0 * k, "t": 2 + 0 * k, "ht": np.where(k < p // 2, 0, 2)}[batch.negatives.corruption]


def candidates_of(sharding: Sharding, batches: list[StepBatch], worker: int) -> Int64:
    """The entities that each of a worker's triples is scored with: int64 `[n * p, n, m]`."""
    found, ends = received(sharding, batches, worker), replaced_ends(batches[worker])
    drawn = batches[worker].negatives
    assert drawn is not None
    if drawn.per_triple:
        return found
    return found[ends // 2 if len(found) == 2 else 0 * ends]


def scores_of(score: ScoreFunction, given: Float32, relations: Float32, candidates: Float32, side: Side) -> Float32:
    """float32 `[b, n]`: scores of candidates, `[n, width]` shared or `[b, n, width]` per triple, for one end."""
    rows = np.ascontiguousarray(candidates.reshape(-1, score.entity_width))
    places = np.arange(len(rows)).reshape(1 if candidates.ndim == 2 else len(candidates), -1)
    queries = score.query(score.prepared(given), relations, side)
    return score.comparison.scores(queries, score.prepared(rows), places)


def type_counts(sharding: Sharding) -> Int64:
    """int64 `[shards, types]`: entities of each type on each shard."""
    kinds = int(sharding.entity_types.max()) + 1
    places = sharding.shard_of.astype(np.int64) * kinds + sharding.entity_types
    return np.bincount(places, minlength=sharding.shards * kinds).reshape(-1, kinds)
