"""Every kind of candidates through both schemes: scores that count are those of a model that knows of no shards."""

from collections.abc import Callable

import numpy as np
import pytest

from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.candidate_losses import EmbeddingMoving, Scheme, Scored, ScoreMoving
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, Corruption, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples
from elastable.replicas.knowledge_graphs.negatives import AllEntities, NegativeSampler, TripleNegatives
from elastable.replicas.knowledge_graphs.samplers import RandomNegatives, RigidSampler, TypedNegatives
from elastable.replicas.knowledge_graphs.scores.catalogue import score_function
from tests.replicas.knowledge_graphs.graphs import ENTITIES, RELATIONS, is_known, random_triples, typed_sharding

WORKERS, DIM = 3, 8
TRIPLES, SHARDING = random_triples(), typed_sharding(WORKERS)
PARTITION = PartitionedTriples.create(TRIPLES, SHARDING)
KNOWN = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)
DRAW = np.random.default_rng(3)
EMBEDDED = DRAW.standard_normal((ENTITIES, DIM)).astype(np.float32)
RELATED = DRAW.standard_normal((RELATIONS, DIM)).astype(np.float32)
LISTS = DRAW.integers(-1, ENTITIES, size=(2, len(TRIPLES), 11))

KINDS: dict[str, Callable[..., NegativeSampler]] = {
    "typed": lambda **k: TypedNegatives(SHARDING, 5, **k),
    "listed": lambda **k: TripleNegatives(SHARDING, heads=LISTS[0], tails=LISTS[1], **k),
    "listed, one list": lambda **k: TripleNegatives(SHARDING, heads=LISTS[0, 0], tails=LISTS[1, 0], **k),
    "all": lambda **k: AllEntities(SHARDING, **k),
    "shared": lambda **k: RandomNegatives(SHARDING, 5, shared=True, **k),
}


def scored(scheme: type[Scheme], negatives: NegativeSampler) -> list[tuple[StepBatch, Scored]]:
    sampler = RigidSampler(PARTITION, 20, negatives=negatives)

    def work(group: ReplicaGroup) -> tuple[StepBatch, Scored]:
        batch = sampler.batch(1, group.rank)
        made = scheme(group, score_function("DistMult", DIM))
        return batch, made.forward(batch, SHARDING.shard_table(EMBEDDED, group.rank), RELATED)

    return run_threads(WORKERS, work)


@pytest.mark.parametrize("scheme", [EmbeddingMoving, ScoreMoving])
@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_scores_do_not_count(scheme: type[Scheme], corruption: Corruption, kind: str) -> None:
    negatives = KINDS[kind](corruption=corruption, exclude="known", known=KNOWN, tell_entities=True)
    found = scored(scheme, negatives)
    for batch, scores in found:
        assert batch.negatives is not None
        p = batch.head.shape[1]
        for b, (head, relation, tail) in enumerate(PARTITION.triples[batch.triple.reshape(-1)].tolist()):
            heads = corruption == "h" or (corruption == "ht" and b % p < p // 2)
            place = b if batch.negatives.per_triple else 0 if heads else -1
            mine = batch.negatives.entities[place].reshape(-1)  # type: ignore[index]
            made = [(e, relation, tail) if heads else (head, relation, e) for e in mine.tolist() if e >= 0]
            counted = np.array([triple for triple in made if not is_known(KNOWN, np.array([triple], np.int32))[0]])
            expected = (EMBEDDED[counted[:, 0]] * RELATED[counted[:, 1]] * EMBEDDED[counted[:, 2]]).sum(1)
            got = scores.negative[b] if scores.counted is None else scores.negative[b][scores.counted[b]]
            np.testing.assert_allclose(np.sort(got), np.sort(expected), rtol=1e-4, atol=1e-5)
