"""Training over replica groups: equal quality for any number of workers, and resuming to the bit."""

from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput, NotFinite
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph.batch import StepBatch
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings, planned_settings, settings_of
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.schemes import CandidateScheme
from elastable.replicas.knowledge_graphs.scores.functions import SCORES
from tests.replicas.knowledge_graphs.graphs import run_epoch, type_counts
from tests.untyped import Keywords

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


def _trainer(group: ReplicaGroup, settings: TrainSettings = WHOLE, steps: int = 0) -> GraphTrainer:
    trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT)
    for _ in range(steps):
        trainer.run_step()
    return trainer


def _states(workers: int, settings: TrainSettings = WHOLE, steps: int = 0) -> list[dict[str, Array]]:
    return run_threads(workers, lambda group: _trainer(group, settings, steps).state())


def _mrr(group: ReplicaGroup, settings: TrainSettings, types: Int32 | None = None) -> float:
    trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, KEPT, entity_types=types)
    if types is not None:
        np.testing.assert_array_equal(trainer.sharding.entity_types, types)
        assert (np.ptp(type_counts(trainer.sharding), axis=0) <= 1).all()
    for _ in range(settings.epochs):
        run_epoch(trainer)
    return Evaluation(trainer.model, TRIPLES).metrics(HELD_OUT)["mrr"]


def _same(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def _close(one: dict[str, Array], other: dict[str, Array], rtol: float, atol: float) -> None:
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("settings", [WHOLE, SAMPLED], ids=["whole-softmax", "sampled"])
def test_any_number_of_workers_gives_a_model_of_the_same_quality(settings: TrainSettings) -> None:
    found = [run_threads(workers, lambda group: _mrr(group, settings)) for workers in (1, 2, 3, 4)]
    assert all(len(set(mrr)) == 1 for mrr in found)  # every worker tells the same
    assert min(mrr[0] for mrr in found) > 0.6  # 0.08 by chance
    assert np.ptp([mrr[0] for mrr in found]) < 0.35


@pytest.mark.parametrize("workers", [1, 3])
def test_typed_candidates_and_drawn_triples_train_as_well(workers: int) -> None:
    settings = TrainSettings.from_json({**SAMPLED.as_json(), "candidates": "typed", "sampling": "random"})
    types = (np.arange(ENTITIES) % 2).astype(np.int32)  # whose ends relations 0 and 2 change, and relation 1 keeps

    found = run_threads(workers, lambda group: _mrr(group, settings, types))
    # Entities of the other type are never compared with the answer in training: chance among them, and no more.
    assert min(found) > 0.35


RESUMED = {
    **{
        f"{name}-{regularizer}": replace(settings, regularizer=regularizer, regularization=0.01)
        for name, settings in (("whole-softmax", WHOLE), ("sampled", SAMPLED))
        for regularizer in ("none", "n3", "l2")
    },
    **{
        f"everything-{loss}": TrainSettings(
            model="TuckER", dim=8, loss=loss, batch=32, epochs=6, optimizer="adam", learning_rate=0.02, dropout=0.2,
            label_smoothing=0.1 if loss != "log-sigmoid" else 0.0, schedule="exponential", warmup_epochs=1.0,
            negatives=16, augment_negative=loss == "log-sigmoid",
        )
        for loss in ("kvsall", "whole-softmax", "log-sigmoid")
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", RESUMED.values(), ids=RESUMED)
def test_resuming_is_bit_identical(settings: TrainSettings) -> None:
    def broken(group: ReplicaGroup) -> dict[str, Array]:
        second = _trainer(group, settings)
        second.restore(_trainer(group, settings, 3).state())
        for _ in range(4):
            second.run_step()
        return second.state()

    _same(_states(2, settings, 7)[0], run_threads(2, broken)[0])


@pytest.mark.parametrize("name", [name for name in RESUMED if name.startswith("everything")])
def test_training_with_everything_lowers_the_loss(name: str) -> None:
    def losses(group: ReplicaGroup) -> list[float]:
        trainer = _trainer(group, RESUMED[name])
        return [run_epoch(trainer) for _ in range(6)]

    found = run_threads(2, losses)[0]
    assert found[-1] < found[0]


def test_a_state_is_loaded_by_any_number_of_workers() -> None:
    state = _states(3, steps=2)[0]

    def again(group: ReplicaGroup) -> dict[str, Array]:
        trainer = _trainer(group)
        trainer.restore(state)
        return trainer.state()

    for workers in (1, 4):
        for found in run_threads(workers, again):
            _same(state, found)


def test_one_worker_and_four_take_the_same_steps_where_nothing_is_drawn() -> None:
    # All triples in one step, and all entities as candidates: the same sums, in another order.
    settings = TrainSettings.from_json({**WHOLE.as_json(), "batch": 4 * 4 * len(KEPT), "optimizer": "sgd"})

    assert run_threads(1, lambda group: _trainer(group, settings).steps_per_epoch) == [1]
    _close(_states(1, settings, 1)[0], _states(4, settings, 1)[0], 1e-5, 1e-6)


def test_a_state_of_another_model_is_refused_and_nothing_changes() -> None:
    state = _states(1, steps=1)[0]

    def work(group: ReplicaGroup) -> None:
        wider = TrainSettings.from_json({**WHOLE.as_json(), "dim": 34})
        trainer = _trainer(group, wider)
        before = trainer.state()
        with pytest.raises(BadInput, match=r"entities must be \[60, 34\], found \[60, 32\]"):
            trainer.restore(state)
        with pytest.raises(BadInput, match="step is missing"):
            trainer.restore({})
        _same(trainer.state(), before)

    run_threads(1, work)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_non_finite_loss_stops_training_and_names_the_step() -> None:
    settings = TrainSettings.from_json({**WHOLE.as_json(), "optimizer": "sgd", "learning_rate": 1e20})
    with pytest.raises(NotFinite, match="smaller learning rate"):
        _states(1, settings, 3 * 5)


def test_more_workers_than_entities_are_refused() -> None:
    with pytest.raises(BadInput, match="2 entities cannot be spread over 3 workers"):
        run_threads(3, lambda group: GraphTrainer(group, WHOLE, 2, 1, np.array([[0, 0, 1]], np.int32)))


@pytest.mark.parametrize(
    ("change", "message"),
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
        ({"candidates": "typed", "loss": "softmax"}, "drawn for each triple.*got shared=True"),
        ({"candidates": "typed", "shared": False}, "of a loss with negatives.*'whole-softmax'"),
        ({"candidates": "near"}, "'near'.*random"),
        ({"sampling": "sorted"}, "'sorted'.*rigid"),
        ({"loss": "kvsall", "reciprocal": False}, "reciprocal relations"),
        ({"loss": "kvsall", "weighting": "frequency"}, "equal weights"),
        ({"loss": "softmax", "label_smoothing": 0.1}, "label_smoothing is of losses over all entities"),
        ({"label_smoothing": 1.0}, "from 0 to below 1"),
        ({"dropout": 1.0}, "from 0 to below 1"),
        ({"dropout": -0.1}, "dropout=-0.1: must be at least 0"),
        ({"augment_negative": True}, "has none"),
        ({"augment_negative": True, "loss": "softmax", "shared": False}, "shared"),
        ({"augment_negative": True, "loss": "softmax", "reciprocal": False}, "reciprocal=False"),
        ({"loss_scale": 0.0}, "loss_scale"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TrainSettings.from_json({**TrainSettings().as_json(), **change})


@pytest.mark.parametrize(
    ("settings", "steps", "rates"),
    [
        ({"schedule": "linear"}, (0, 10, 40, 90), (0.4, 0.3, 0.0, 0.0)),
        ({"schedule": "cosine"}, (0, 20, 40), (0.4, 0.2, 0.0)),
        ({"schedule": "exponential", "decay": 0.5}, (0, 10, 20, 30), (0.4, 0.2, 0.1, 0.05)),
        ({"warmup_epochs": 2}, (0, 1, 18, 19, 20, 39), (0.02, 0.04, 0.38, 0.4, 0.4, 0.4)),
        ({"schedule": "linear", "warmup_epochs": 1}, (5,), (0.4 * 0.6 * (1 - 5 / 40),)),
    ],
)
def test_learning_rates_follow_their_schedule(
    settings: Keywords, steps: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    made = TrainSettings(learning_rate=0.4, epochs=4, **settings)
    assert [made.rate(step, 40) for step in steps] == pytest.approx(rates)


def test_workers_that_read_different_numbers_of_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBatch, "gathered_rows", property(lambda batch: batch.worker))

    def work(group: ReplicaGroup) -> None:
        trainer = GraphTrainer(group, WHOLE, ENTITIES, RELATIONS, KEPT)
        with pytest.raises(BadInput, match=r"step 0: workers read \[0, 1\] rows of their shards"):
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
    assert isinstance(trainer._scheme, CandidateScheme)
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


# Defaults by the size of a graph: what is chosen on two cores, and what stays as it was given


SMALL = (2_034, 32_888)  # CoDEx-S
DENSE = (14_541, 272_115)  # FB15k-237
MIDDLE = (17_050, 185_584)  # CoDEx-M
SPARSE = (40_943, 86_835)  # WN18RR


WHOLE_256: Keywords = {"loss": "whole-softmax", "dim": 256}
PLANS: list[tuple[tuple[int, int], Keywords, Keywords, list[str]]] = [
    (SMALL, {}, {**WHOLE_256, "epochs": 40}, []),
    (DENSE, {}, {**WHOLE_256, "regularization": 0.003, "budget_minutes": None}, ["an epoch takes up to"]),
    (SPARSE, {}, {"loss": "softmax", "negatives": 2048, "shared": True, "dim": 256}, ["softmax: all 40,943 entities"]),
    (SPARSE, {"budget": 2.0}, {"loss": "softmax", "dim": 128},
     ["dim 128: with 256 values, 40 epochs may take longer than 2 minutes"]),
    (DENSE, {"budget": 25.0}, {"loss": "whole-softmax", "dim": 128, "budget_minutes": 25.0}, ["dim 128: with", "25 m"]),
    (DENSE, {"budget": 5.0}, {"loss": "softmax", "budget_minutes": 5.0}, []),
    (DENSE, {"budget": 0.5}, {"budget_minutes": 0.5}, ["30 s"]),
    # How fast the machine is decides how many epochs a budget holds, not an estimate.
    *((size, {"budget": 40.0}, {"epochs": 200, "budget_minutes": 40.0},
       ["epochs 200: training ends after 40 minutes, or when validation MRR stops rising"])
      for size in (SMALL, DENSE, MIDDLE, SPARSE)),
    (DENSE, {"dim": 64, "epochs": 3, "regularization": 0.5}, {"dim": 64, "epochs": 3, "regularization": 0.5}, []),
    (SPARSE, {"loss": "whole-softmax"}, {"epochs": 40, "dim": 256}, []),
]  # fmt: skip


@pytest.mark.parametrize(("size", "given", "wanted", "said"), PLANS)
def test_settings_are_chosen_by_the_size_of_the_graph(
    size: tuple[int, int], given: Keywords, wanted: Keywords, said: list[str]
) -> None:
    chosen = dict(given)
    settings, reasons = planned_settings("ComplEx", chosen, *size, budget_minutes=chosen.pop("budget", None), cores=2)
    assert {each: getattr(settings, each) for each in wanted} == wanted
    assert all(part in " ".join(reasons) for part in said)
    if not said and "budget" not in given:
        assert (settings, reasons) == (settings_of("ComplEx", given), ())


@pytest.mark.parametrize("size", [DENSE, MIDDLE])
def test_epochs_are_as_many_as_fit(size: tuple[int, int]) -> None:
    few, many = (planned_settings("ComplEx", {}, *size, cores=cores)[0].epochs for cores in (2, 8))
    assert 20 <= few < many == 40
    planned, _ = planned_settings("ComplEx", {"schedule": "linear"}, *size, budget_minutes=40.0, cores=2)
    assert planned.epochs <= 40  # at whose end the learning rate is 0


@pytest.mark.parametrize("model", sorted(SCORES))
@pytest.mark.parametrize("size", [SMALL, DENSE, SPARSE])
def test_every_model_has_a_plan_for_every_size(model: str, size: tuple[int, int]) -> None:
    assert planned_settings(model, {}, *size, budget_minutes=40.0, cores=2)[0].model == model
