"""Schemes: embedding-moving equals score-moving, and both equal scores that know of no shards."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, Corruption, Side, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding
from elastable.replicas.knowledge_graphs.losses import Loss
from elastable.replicas.knowledge_graphs.samplers import RandomNegatives, RigidSampler, TypedNegatives
from elastable.replicas.knowledge_graphs.schemes import (
    CandidateScheme,
    EmbeddingMoving,
    Scored,
    ScoreMoving,
    StepGradients,
)
from elastable.replicas.knowledge_graphs.scores.functions import SCORES, score_function
from tests.replicas.knowledge_graphs.graphs import (
    ENTITIES,
    RELATIONS,
    candidates_of,
    is_known,
    random_triples,
    replaced_ends,
    typed_sharding,
)
from tests.untyped import Keyword

LOSS = Loss("log-sigmoid", 2.0, 1.0)
Outcome = tuple[StepBatch, Scored, StepGradients]


class Graph:
    """A random graph over some shards, with its embeddings in the order of global ids."""

    def __init__(self, name: str, dim: int, shards: int, batch: int, count: int, **negatives: Keyword) -> None:
        draw = np.random.default_rng(11)
        self.score = score_function(name, dim)
        self.triples = np.stack([draw.integers(0, m, 2000) for m in (ENTITIES, RELATIONS, ENTITIES)], axis=1)
        self.sharding = Sharding.create(ENTITIES, shards, seed=1)
        self.entities = draw.standard_normal((ENTITIES, self.score.entity_width)).astype(np.float32)
        self.relations = draw.standard_normal((RELATIONS, self.score.relation_width)).astype(np.float32)
        self.partition = PartitionedTriples.create(self.triples, self.sharding)
        drawn = RandomNegatives(self.sharding, count, seed=2, **negatives)
        self.sampler = RigidSampler(self.partition, batch, seed=3, negatives=drawn)

    def run(self, scheme: type[CandidateScheme]) -> list[Outcome]:
        """One step on every worker, with the gradients of a loss."""

        def work(group: ReplicaGroup) -> Outcome:
            batch = self.sampler.batch(0, group.rank)
            made = scheme(group, score_function(self.score.name, self.score.dim), LOSS)
            scored = made.forward(batch, self.sharding.shard_table(self.entities, group.rank), self.relations)
            assert len(set(group.all_gather(np.array(batch.gathered_rows)))) == 1  # the same for every worker
            _, *slopes = LOSS(scored.positive, scored.negative, self.weight(batch), scored.counted)
            return batch, scored, scored.backward(*slopes)

        return run_threads(self.sharding.shards, work)

    def weight(self, batch: StepBatch) -> Array:
        """Of a mean over the step's triples, as the trainer has it, `[b]`."""
        return (batch.weight.reshape(-1) / np.float32(max(1, batch.present))).astype(np.float32)

    def own(self, batch: StepBatch) -> Array:
        return self.partition.triples[batch.triple.reshape(-1)]

    def whole(self, found: list[Outcome]) -> tuple[Array, Array]:
        """Gradients of all entities and relations, summed over the workers."""
        entities = np.zeros(self.entities.shape)
        for worker, (_, _, gradients) in enumerate(found):
            entities[self.sharding.entity_at[worker, gradients.rows]] = gradients.entities
        return entities, np.sum([gradients.relations.astype(np.float64) for *_, gradients in found], axis=0)


@pytest.mark.parametrize("corruption", ["h", "t", "ht"])
@pytest.mark.parametrize("scheme", [EmbeddingMoving, ScoreMoving])
@pytest.mark.parametrize("shared", [False, True])
def test_scores_are_those_without_shards(scheme: type[CandidateScheme], corruption: Corruption, shared: bool) -> None:
    # The oracle's shapes: TransE, L1, dim 128, n=4, 48 triples a worker, 250 candidates, at rtol 1e-4
    # (bess-kge, tests/test_bess.py).
    graph = Graph("TransE", 128, 4, 48, 250 // 4, corruption=corruption, shared=shared)
    found = graph.run(scheme)
    batches = [batch for batch, *_ in found]
    for batch, scored, _ in found:
        triples, drawn = graph.own(batch), candidates_of(graph.sharding, batches, batch.worker)
        head, relation, tail = (
            graph.entities[triples[:, 0]], graph.relations[triples[:, 1]], graph.entities[triples[:, 2]]
        )  # fmt: skip
        np.testing.assert_allclose(scored.positive, -np.abs(head + relation - tail).sum(1), rtol=1e-4)
        for b in range(len(triples)):
            heads = corruption == "h" or (corruption == "ht" and b % graph.sampler.block < graph.sampler.block // 2)
            candidates = graph.entities[drawn[b].reshape(-1)]
            moved = candidates + relation[b] - tail[b] if heads else head[b] + relation[b] - candidates
            np.testing.assert_allclose(scored.negative[b], -np.abs(moved).sum(1), rtol=1e-4)


@pytest.mark.parametrize("corruption", ["h", "t", "ht"])
@pytest.mark.parametrize("name", [name for name in SCORES if name != "ConvE"])
def test_schemes_are_equal_to_the_bit_where_candidates_are_not_shared(name: str, corruption: Corruption) -> None:
    graph = Graph(name, 32, 3, 24, 7, corruption=corruption)
    moving, scoring = graph.run(EmbeddingMoving), graph.run(ScoreMoving)
    for (_, one, _), (_, two, _) in zip(moving, scoring, strict=True):
        np.testing.assert_array_equal(one.positive, two.positive)
        np.testing.assert_array_equal(one.negative, two.negative)
    for first, second in zip(graph.whole(moving), graph.whole(scoring), strict=True):
        # The oracle: gradients to 2e-7 (bess-kge, tests/test_bess.py).
        np.testing.assert_allclose(first, second, rtol=0, atol=2e-7)
        assert np.abs(first).max() > 1e-3


@pytest.mark.parametrize("scheme", [EmbeddingMoving, ScoreMoving])
@pytest.mark.parametrize("name", ["TransE", "ComplEx", "PairRE"])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_those_without_shards(scheme: type[CandidateScheme], name: str, shared: bool) -> None:
    graph = Graph(name, 16, 3, 12, 5, corruption="ht", shared=shared)
    found = graph.run(scheme)
    entities, relations = graph.whole(found)
    # The same in one process, with the candidates that each triple met.
    to_entities, to_relations = np.zeros(graph.entities.shape), np.zeros(graph.relations.shape)
    batches = [batch for batch, *_ in found]
    for batch, scored, _ in found:
        triples, score = graph.own(batch), graph.score
        drawn = candidates_of(graph.sharding, batches, batch.worker)
        _, to_own, to_others = LOSS(scored.positive, scored.negative, graph.weight(batch), scored.counted)
        for b, (head, relation, tail) in enumerate(triples):
            heads = b % graph.sampler.block < graph.sampler.block // 2
            against = np.append(drawn[b], head if heads else tail)
            slopes = np.append(to_others[b], to_own[b])[None].astype(np.float32)
            given, raw = graph.entities[[tail if heads else head]], graph.entities[against]
            side: Side = "head" if heads else "tail"
            rows, mine = score.prepared(raw), score.prepared(given)
            query = score.query(mine, graph.relations[[relation]], side)
            places = np.arange(len(rows))[None]
            to_rows = np.zeros_like(rows)
            scores = score.comparison.scores(query, rows, places)
            to_query = score.comparison.gradients(query, rows, places, scores, slopes, places, to_rows)
            to_given, to_relation, _ = score.query_gradients(mine, graph.relations[[relation]], side, to_query)
            np.add.at(to_entities, against, score.unprepared(raw, to_rows))
            to_entities[tail if heads else head] += score.unprepared(given, to_given)[0]
            to_relations[relation] += to_relation[0]
    np.testing.assert_allclose(entities, to_entities, rtol=1e-4, atol=4e-7)
    np.testing.assert_allclose(relations, to_relations, rtol=1e-4, atol=4e-7)


@pytest.mark.parametrize("name", ["TransE", "ComplEx"])
def test_schemes_score_the_same_shared_candidates(name: str) -> None:
    graph = Graph(name, 32, 3, 24, 7, corruption="ht", shared=True, total=19)
    moving, scoring = graph.run(EmbeddingMoving), graph.run(ScoreMoving)
    for (_, one, _), (_, two, _) in zip(moving, scoring, strict=True):
        np.testing.assert_allclose(one.negative, two.negative, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(one.counted, two.counted)
    for first, second in zip(graph.whole(moving), graph.whole(scoring), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", [EmbeddingMoving, ScoreMoving])
def test_conve_has_gradients_of_its_variables_in_every_scheme(scheme: type[CandidateScheme]) -> None:
    graph = Graph("ConvE", 8, 2, 8, 3, corruption="t")
    for *_, gradients in graph.run(scheme):
        assert set(gradients.dense) == set(graph.score.dense)
        assert all(np.abs(gradient).max() > 0 for gradient in gradients.dense.values())


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_sent_are_those_of_the_formula(workers: int) -> None:
    graph = Graph("TransE", 32, workers, 24, 5, corruption="t")
    p, m, width = graph.sampler.block, 5, 32 * 4
    others, triples = workers - 1, workers * graph.sampler.block

    def sent(scheme: type[CandidateScheme], graph: Graph = graph) -> list[int]:
        def work(group: ReplicaGroup) -> int:
            batch = graph.sampler.batch(0, group.rank)
            made = scheme(group, score_function("TransE", 32), LOSS)
            made.forward(batch, graph.sharding.shard_table(graph.entities, group.rank), graph.relations)
            return group.bytes_sent

        return run_threads(workers, work)

    assert sent(EmbeddingMoving) == [others * width * (p + triples * m)] * workers
    scores = [others * (width * p + width * triples + 4 * triples * m)] * workers
    assert sent(ScoreMoving) == scores
    assert sent(ScoreMoving, Graph("TransE", 32, workers, 24, 5, corruption="t", shared=True)) == scores


def test_a_step_without_candidates_and_another_workers_batch_are_refused() -> None:
    graph = Graph("DistMult", 16, 2, 8, 4, corruption="t")

    def work(group: ReplicaGroup, change: dict[str, None] | dict[str, int]) -> None:
        batch = replace(graph.sampler.batch(0, group.rank), **change)
        EmbeddingMoving(group, graph.score, LOSS).forward(
            batch, graph.sharding.shard_table(graph.entities, group.rank), graph.relations
        )

    with pytest.raises(BadInput, match="give its sampler negatives"):
        run_threads(2, lambda group: work(group, {"negatives": None}))
    with pytest.raises(BadInput, match="a batch of worker 7"):
        run_threads(2, lambda group: work(group, {"worker": 7}))


# Every kind of candidates through both schemes: scores that count are those of a model that knows of no shards


WORKERS, DIM = 3, 8
TRIPLES, SHARDING = random_triples(), typed_sharding(WORKERS)
PARTITION, TYPES = PartitionedTriples.create(TRIPLES, SHARDING), SHARDING.entity_types
KNOWN = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)
DRAW = np.random.default_rng(3)
EMBEDDED = DRAW.standard_normal((ENTITIES, DIM)).astype(np.float32)
RELATED = DRAW.standard_normal((RELATIONS, DIM)).astype(np.float32)

KINDS: dict[str, Callable[..., RandomNegatives]] = {
    "typed": lambda **k: TypedNegatives(SHARDING, 5, **k),
    "shared": lambda **k: RandomNegatives(SHARDING, 5, shared=True, **k),
}


def scored(scheme: type[CandidateScheme], negatives: RandomNegatives) -> list[tuple[StepBatch, Scored]]:
    sampler = RigidSampler(PARTITION, 20, negatives=negatives)

    def work(group: ReplicaGroup) -> tuple[StepBatch, Scored]:
        batch = sampler.batch(1, group.rank)
        made = scheme(group, score_function("DistMult", DIM), LOSS)
        return batch, made.forward(batch, SHARDING.shard_table(EMBEDDED, group.rank), RELATED)

    return run_threads(WORKERS, work)


@pytest.mark.parametrize("scheme", [EmbeddingMoving, ScoreMoving])
@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_scores_do_not_count(scheme: type[CandidateScheme], corruption: Corruption, kind: str) -> None:
    found = scored(scheme, KINDS[kind](corruption=corruption, known=KNOWN))
    batches = [batch for batch, _ in found]
    for batch, scores in found:
        drawn, ends = candidates_of(SHARDING, batches, batch.worker), replaced_ends(batch)
        for b, (head, relation, tail) in enumerate(PARTITION.triples[batch.triple.reshape(-1)].tolist()):
            replaced = head if ends[b] == 0 else tail
            mine = [
                e for e in drawn[b].reshape(-1).tolist() if kind == "shared" or TYPES[e] == TYPES[replaced]
            ]  # others are padding
            made = [(e, relation, tail) if ends[b] == 0 else (head, relation, e) for e in mine]
            counted = np.array([triple for triple in made if not is_known(KNOWN, np.array([triple], np.int32))[0]])
            expected = (EMBEDDED[counted[:, 0]] * RELATED[counted[:, 1]] * EMBEDDED[counted[:, 2]]).sum(1)
            got = scores.negative[b] if scores.counted is None else scores.negative[b][scores.counted[b]]
            np.testing.assert_allclose(np.sort(got), np.sort(expected), rtol=1e-4, atol=1e-5)
