"""Training over replica groups: equal quality for any number of workers, and resuming to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput, NotFinite
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.settings import TrainSettings

ENTITIES, RELATIONS = 60, 3


def _graph() -> Int32:
    """Entities on a ring; a relation k leads k + 1 places on."""
    places = np.arange(ENTITIES)
    parts = [np.stack([places, np.full_like(places, k), (places + k + 1) % ENTITIES], axis=1) for k in range(RELATIONS)]
    return np.concatenate(parts).astype(np.int32)


TRIPLES = _graph()
HELD_OUT, KEPT = TRIPLES[7::9], np.delete(TRIPLES, np.s_[7::9], axis=0)

WHOLE = TrainSettings(model="ComplEx", dim=32, batch=48, epochs=30, learning_rate=0.2, seed=4)
SAMPLED = TrainSettings(
    model="RotatE", dim=32, batch=48, epochs=60, learning_rate=0.02, optimizer="adam", loss="log-sigmoid",
    margin=4.0, adversarial=1.0, negatives=24, shared=False, reciprocal=False, filtered=True, seed=4,
)  # fmt: skip


def _trained(group: ReplicaGroup, settings: TrainSettings, epochs: int) -> tuple[GraphTrainer, float]:
    trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT)
    for _ in range(epochs):
        trainer.run_epoch()
    evaluation = Evaluation(trainer.model, settings.reciprocal, RELATIONS, TRIPLES)
    return trainer, evaluation.metrics(HELD_OUT)["mrr"]


@pytest.mark.parametrize("settings", [WHOLE, SAMPLED], ids=["whole-softmax", "sampled"])
def test_any_number_of_workers_gives_a_model_of_the_same_quality(settings: TrainSettings) -> None:
    found = [
        run_threads(workers, lambda group: _trained(group, settings, settings.epochs)[1]) for workers in (1, 2, 3, 4)
    ]
    assert all(len(set(mrr)) == 1 for mrr in found)  # every worker tells the same
    assert min(mrr[0] for mrr in found) > 0.6  # 0.08 by chance
    assert np.ptp([mrr[0] for mrr in found]) < 0.35


@pytest.mark.parametrize("workers", [1, 3])
def test_typed_candidates_and_drawn_triples_train_as_well(workers: int) -> None:
    settings = TrainSettings.from_json({**SAMPLED.as_json(), "candidates": "typed", "sampling": "random"})
    types = (np.arange(ENTITIES) % 2).astype(np.int32)  # whose ends relations 0 and 2 change, and relation 1 keeps

    def work(group: ReplicaGroup) -> float:
        trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT, entity_types=types)
        np.testing.assert_array_equal(trainer.sharding.entity_types, types)
        per_type = trainer.sharding.type_counts
        assert (np.ptp(per_type, axis=0) <= 1).all()
        for _ in range(settings.epochs):
            trainer.run_epoch()
        return Evaluation(trainer.model, settings.reciprocal, RELATIONS, TRIPLES).metrics(HELD_OUT)["mrr"]

    found = run_threads(workers, work)
    # Entities of the other type are never told apart from the answer in training: chance among them, and no more.
    assert min(found) > 0.35


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"candidates": "typed", "shared": True}, "drawn for each triple.*got shared=True"),
        ({"candidates": "typed", "loss": "whole-softmax"}, "of a loss with negatives.*'whole-softmax'"),
        ({"candidates": "near"}, "'near'.*random"),
        ({"sampling": "sorted"}, "'sorted'.*rigid"),
    ],
)
def test_invalid_sampling_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        TrainSettings.from_json({**SAMPLED.as_json(), **changes})


def test_both_schemes_train_the_same_model() -> None:
    def state(scheme: str) -> dict[str, Array]:
        settings = TrainSettings.from_json({**SAMPLED.as_json(), "scheme": scheme})
        return run_threads(3, lambda group: _trained(group, settings, 2)[0].state())[0]

    moving, scoring = state("embedding-moving"), state("score-moving")
    for name, value in moving.items():
        np.testing.assert_allclose(value, scoring[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("regularizer", ["none", "n3", "l2"])
@pytest.mark.parametrize("settings", [WHOLE, SAMPLED], ids=["whole-softmax", "sampled"])
def test_resuming_is_bit_identical(settings: TrainSettings, regularizer: str) -> None:
    settings = TrainSettings.from_json({**settings.as_json(), "regularizer": regularizer, "regularization": 0.01})

    def straight(group: ReplicaGroup) -> dict[str, Array]:
        trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT)
        for _ in range(7):
            trainer.run_step()
        return trainer.state()

    def broken(group: ReplicaGroup) -> dict[str, Array]:
        first = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT)
        for _ in range(3):
            first.run_step()
        state = first.state()
        second = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT)
        second.restore(state)
        for _ in range(4):
            second.run_step()
        return second.state()

    one, other = run_threads(2, straight)[0], run_threads(2, broken)[0]
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def test_a_state_is_loaded_by_any_number_of_workers() -> None:
    state = run_threads(3, lambda group: _trained(group, WHOLE, 2)[0].state())[0]

    def again(group: ReplicaGroup) -> dict[str, Array]:
        trainer = GraphTrainer(group, WHOLE, ENTITIES, RELATIONS, KEPT)
        trainer.restore(state)
        return trainer.state()

    for workers in (1, 4):
        for found in run_threads(workers, again):
            for name, value in state.items():
                np.testing.assert_array_equal(found[name], value)


def test_initial_values_do_not_depend_on_the_workers() -> None:
    def entities(group: ReplicaGroup) -> Array:
        return GraphTrainer(group, WHOLE, ENTITIES, RELATIONS, KEPT).state()["entities"]

    np.testing.assert_array_equal(run_threads(1, entities)[0], run_threads(4, entities)[2])


def test_one_worker_and_four_take_the_same_steps_where_nothing_is_drawn() -> None:
    # All triples in one step, and all entities as candidates: the same sums, in another order.
    settings = TrainSettings.from_json({**WHOLE.as_json(), "batch": 4 * 4 * len(KEPT), "optimizer": "sgd"})

    def one_step(group: ReplicaGroup) -> dict[str, Array]:
        trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT)
        assert trainer.steps_per_epoch == 1
        trainer.run_step()
        return trainer.state()

    alone, four = run_threads(1, one_step)[0], run_threads(4, one_step)[0]
    for name, value in alone.items():
        np.testing.assert_allclose(value, four[name], rtol=1e-5, atol=1e-6)


def test_conve_trains_with_its_variables() -> None:
    settings = TrainSettings(model="ConvE", dim=16, batch=64, epochs=2, learning_rate=0.01, optimizer="adam")

    def work(group: ReplicaGroup) -> tuple[float, float, dict[str, Array], dict[str, Array]]:
        trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT)
        start = trainer.state()
        losses = [trainer.run_epoch().loss for _ in range(4)]
        return losses[0], losses[-1], start, trainer.state()

    for first, last, start, end in run_threads(2, work):
        assert last < first
        assert all((start[name] != end[name]).any() for name in start if "slots" not in name)


def test_a_state_of_another_model_is_refused_and_nothing_changes() -> None:
    state = run_threads(1, lambda group: _trained(group, WHOLE, 1)[0].state())[0]

    def work(group: ReplicaGroup) -> None:
        wider = TrainSettings.from_json({**WHOLE.as_json(), "dim": 34})
        trainer = GraphTrainer(group, wider, ENTITIES, RELATIONS, KEPT)
        before = trainer.state()
        with pytest.raises(BadInput, match=r"entities must be \[60, 34\], found \[60, 32\]"):
            trainer.restore(state)
        with pytest.raises(BadInput, match="step is missing"):
            trainer.restore({})
        for name, value in trainer.state().items():
            np.testing.assert_array_equal(value, before[name])

    run_threads(1, work)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_non_finite_loss_stops_training_and_names_the_step() -> None:
    settings = TrainSettings.from_json({**WHOLE.as_json(), "optimizer": "sgd", "learning_rate": 1e20})
    with pytest.raises(NotFinite, match="smaller learning rate"):
        run_threads(1, lambda group: _trained(group, settings, 3))


def test_more_workers_than_entities_are_refused() -> None:
    with pytest.raises(BadInput, match="2 entities cannot be spread over 3 workers"):
        run_threads(3, lambda group: GraphTrainer(group, WHOLE, 2, 1, np.array([[0, 0, 1]], np.int32)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "Complexity"}, "score function 'Complexity'"),
        ({"loss": "hinge"}, "loss='hinge': must be one of whole-softmax, kvsall, log-sigmoid"),
        ({"scheme": "moving"}, "must be one of score-moving, embedding-moving"),
        ({"dim": 0}, "dim=0: must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan: must be at least 0"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm'"),
        ({"model": "ConvE", "reciprocal": False}, "reciprocal"),
        ({"schedule": "step"}, "must be one of constant, linear, cosine"),
        ({"regularizer": "l1"}, "must be one of none, l2, n3"),
        ({"batch": "512"}, "batch='512': must be at least 1"),
        ({"shared": 1}, "shared=1: must be of type bool"),
        ({"epoch": 3}, "have no epoch"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        TrainSettings.from_json({**TrainSettings().as_json(), **change})


def test_learning_rates_fall_as_their_schedule_says() -> None:
    settings = TrainSettings(learning_rate=2.0, schedule="linear")
    assert [settings.rate(step, 4) for step in (0, 1, 4, 9)] == [2.0, 1.5, 0.0, 0.0]
    cosine = TrainSettings(learning_rate=2.0, schedule="cosine")
    assert [cosine.rate(step, 4) for step in (0, 2, 4)] == pytest.approx([2.0, 1.0, 0.0])


def test_workers_that_read_different_numbers_of_rows_are_refused() -> None:
    class Unbalanced(GraphTrainer):
        def _gradients(self, *step: Any) -> Any:
            loss, gradients, gathered = super()._gradients(*step)
            return loss, gradients, gathered + self.group.rank

    def work(group: ReplicaGroup) -> None:
        trainer = Unbalanced(group, WHOLE, ENTITIES, RELATIONS, KEPT)
        with pytest.raises(BadInput, match=r"step 0: workers read \[\d+, \d+\] rows of their shards"):
            trainer.run_step()

    run_threads(2, work)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheme", ["score-moving", "embedding-moving"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_number_of_negatives_does_not_depend_on_the_number_of_workers(scheme: str, shared: bool) -> None:
    """A triple is scored with as many, and scores and loss agree in expectation."""
    found = {workers: run_threads(workers, lambda group: _sampled(group, scheme, shared))[0] for workers in (1, 3, 4)}
    for workers, (counts, score, loss, error) in found.items():
        assert counts == {7}, workers
        # Means of some thousand triples; by chance they differ by a few standard errors.
        assert score == pytest.approx(found[1][1], abs=5 * error)
        assert loss == pytest.approx(found[1][2], rel=0.02)


def _sampled(group: ReplicaGroup, scheme: str, shared: bool) -> tuple[set[int], float, float, float]:
    """How many candidates a triple had, their mean score, the mean loss, and the standard error of the former."""
    settings = TrainSettings(
        model="DistMult", dim=8, spread=1.0, loss="softmax", negatives=7, shared=shared, scheme=scheme,
        reciprocal=False, batch=60, learning_rate=0.0, optimizer="sgd",
    )  # fmt: skip
    trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES)
    counts, scores, losses = set[int](), list[float](), list[float]()
    assert trainer._scheme is not None
    for step in range(240):
        batch = trainer._sampler.batch(step, group.rank)
        scored = trainer._scheme.forward(batch, trainer.model.entities, trainer.model.relations)
        counted = np.ones_like(scored.negative, np.bool_) if scored.counted is None else scored.counted
        there = batch.mask.reshape(-1)
        counts |= set(counted[there].sum(1).tolist())
        scores.append(float(scored.negative[counted & there[:, None]].mean()))
        losses.append(trainer.run_step()[0])
    every = group.all_gather(np.array(scores))
    return counts, float(every.mean()), float(np.mean(losses)), float(every.std() / np.sqrt(every.shape[1]))
