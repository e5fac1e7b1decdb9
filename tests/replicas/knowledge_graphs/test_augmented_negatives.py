"""The tails of the step's other triples as candidates: which they are, what is masked, and what the loss is."""

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph.batch import StepBatch
from elastable.replicas.knowledge_graphs.graph.known_triples import KnownTriples
from elastable.replicas.knowledge_graphs.graph.sharding import PartitionedTriples, Sharding
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.sampling.random_negatives import AugmentedNegatives
from elastable.replicas.knowledge_graphs.sampling.samplers import RigidSampler
from elastable.replicas.knowledge_graphs.schemes.candidate_losses import EmbeddingMoving, Scheme, Scored, ScoreMoving
from elastable.replicas.knowledge_graphs.scores.catalogue import score_function
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from tests.replicas.knowledge_graphs.graphs import run_epoch
from tests.untyped import Keyword

ENTITIES, RELATIONS, DIM, DRAWN = 40, 3, 8, 5
TRIPLES = np.unique(np.random.default_rng(2).integers(0, [ENTITIES, RELATIONS, ENTITIES], (150, 3)), axis=0).astype(
    np.int32
)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("kind", [ScoreMoving, EmbeddingMoving])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_triple_is_scored_with_the_tails_of_the_others(kind: type[Scheme], workers: int, filtered: bool) -> None:
    draw, score = np.random.default_rng(1), score_function("DistMult", DIM)
    entities = draw.standard_normal((ENTITIES, DIM)).astype(np.float32)
    relations = draw.standard_normal((RELATIONS, DIM)).astype(np.float32)
    sharding = Sharding.create(ENTITIES, workers)
    partition = PartitionedTriples.create(TRIPLES, sharding)
    known = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)
    drawn = AugmentedNegatives(
        sharding, -(-DRAWN // workers), seed=4, known=known if filtered else None, tell_entities=True, total=DRAWN
    )
    sampler = RigidSampler(partition, 12, negatives=drawn)

    def work(group: ReplicaGroup) -> tuple[StepBatch, Scored]:
        batch = sampler.batch(0, group.rank)
        return batch, kind(group, score).forward(batch, sharding.shard_table(entities, group.rank), relations)

    found = run_threads(workers, work)
    step = np.concatenate([partition.triples[batch.triple[batch.mask]] for batch, _ in found])
    for batch, scored in found:
        assert batch.negatives is not None
        assert batch.negatives.entities is not None
        assert scored.counted is not None
        candidates = batch.negatives.entities.reshape(-1)  # -1: padding
        random = np.concatenate([shard[-drawn.count :] for shard in batch.negatives.entities[0]])
        expected = sorted([*step[:, 2].tolist(), *random[random >= 0].tolist()])
        assert sorted(candidates[candidates >= 0].tolist()) == expected
        assert (random >= 0).sum() == DRAWN
        for b, (h, r, t) in enumerate(partition.triples[batch.triple.reshape(-1)]):
            true = TRIPLES[(TRIPLES[:, 0] == h) & (TRIPLES[:, 1] == r), 2] if filtered else [t]
            np.testing.assert_array_equal(scored.counted[b], (candidates >= 0) & ~np.isin(candidates, true))
            counts = scored.counted[b]
            np.testing.assert_allclose(
                scored.negative[b][counts],
                entities[candidates[counts]] @ (entities[h] * relations[r]),
                rtol=1e-4,
                atol=1e-5,
            )


def _losses(**settings: Keyword) -> list[float]:
    made = TrainSettings(model="DistMult", dim=DIM, loss="softmax", negatives=8, batch=32, epochs=2, **settings)

    def work(group: ReplicaGroup) -> list[float]:
        trainer = GraphTrainer(group, made, ENTITIES, RELATIONS, TRIPLES)
        return [run_epoch(trainer) for _ in range(2)]

    return run_threads(2, work)[0]


def test_training_with_them() -> None:
    assert _losses(augment_negative=True, learning_rate=0.05)[1] < _losses(augment_negative=True, learning_rate=0.0)[1]


def test_the_scale_of_the_loss_scales_loss_and_gradients_and_not_the_penalty() -> None:
    for loss in ("softmax", "whole-softmax", "kvsall"):
        found = []
        for scale in (1.0, 4.0):
            made = TrainSettings(
                model="DistMult", dim=DIM, loss=loss, negatives=8, batch=32, optimizer="sgd", learning_rate=1.0,
                loss_scale=scale, regularizer="l2", regularization=0.3,
            )  # fmt: skip

            def work(group: ReplicaGroup, made: TrainSettings = made) -> tuple[float, Array]:
                trainer = GraphTrainer(group, made, ENTITIES, RELATIONS, TRIPLES)
                before = trainer.model.relations.copy()
                value, _ = trainer.run_step()
                return value, before - trainer.model.relations

            found.append(run_threads(1, work)[0])
        made = TrainSettings(
            model="DistMult", dim=DIM, loss=loss, negatives=8, batch=32, optimizer="sgd", learning_rate=1.0
        )

        def alone(group: ReplicaGroup, made: TrainSettings = made) -> Array:
            trainer = GraphTrainer(group, made, ENTITIES, RELATIONS, TRIPLES)
            before = trainer.model.relations.copy()
            trainer.run_step()
            return before - trainer.model.relations

        loss_only = run_threads(1, alone)[0]
        assert found[1][0] == pytest.approx(4 * found[0][0], rel=1e-5)
        np.testing.assert_allclose(found[1][1] - found[0][1], 3 * loss_only, rtol=1e-3, atol=1e-6)
