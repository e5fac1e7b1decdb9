"""Defaults by the size of a graph: what is chosen on two cores, and what stays as it was given."""

import pytest

from elastable.replicas.knowledge_graphs.graph_settings import planned_settings, settings_of
from elastable.replicas.knowledge_graphs.scores.catalogue import SCORES

SMALL = (2_034, 32_888)  # CoDEx-S
DENSE = (14_541, 272_115)  # FB15k-237
MIDDLE = (17_050, 185_584)  # CoDEx-M
SPARSE = (40_943, 86_835)  # WN18RR


def test_a_small_graph_keeps_the_defaults() -> None:
    assert planned_settings("ComplEx", {}, *SMALL, cores=2) == (settings_of("ComplEx", {}), ())


@pytest.mark.parametrize("size", [DENSE, MIDDLE])
def test_a_dense_graph_gets_as_many_epochs_as_fit(size: tuple[int, int]) -> None:
    settings, reasons = planned_settings("ComplEx", {}, *size, cores=2)
    assert (settings.loss, settings.dim, settings.regularization) == ("whole-softmax", 256, 0.003)
    assert 20 <= settings.epochs < 40
    assert settings.budget_minutes is None
    assert any(f"epochs {settings.epochs}: an epoch takes up to" in reason for reason in reasons)
    more, _ = planned_settings("ComplEx", {}, *size, cores=8)
    assert more.epochs == 40


def test_a_sparse_graph_of_many_entities_is_sampled() -> None:
    settings, reasons = planned_settings("ComplEx", {}, *SPARSE, cores=2)
    assert (settings.loss, settings.negatives, settings.shared, settings.dim) == ("softmax", 2048, True, 256)
    assert any(reason.startswith("loss softmax: all 40,943 entities") for reason in reasons)
    short, reasons = planned_settings("ComplEx", {}, *SPARSE, budget_minutes=2.0, cores=2)
    assert (short.loss, short.dim) == ("softmax", 128)
    assert "dim 128: with 256 values, 40 epochs may take longer than 2 minutes" in reasons


def test_a_short_budget_takes_a_smaller_dimension_and_then_a_sample() -> None:
    short, reasons = planned_settings("ComplEx", {}, *DENSE, budget_minutes=25.0, cores=2)
    assert (short.loss, short.dim, short.budget_minutes) == ("whole-softmax", 128, 25.0)
    assert any(reason.startswith("dim 128: ") and "25 minutes" in reason for reason in reasons)
    shorter, _ = planned_settings("ComplEx", {}, *DENSE, budget_minutes=5.0, cores=2)
    assert (shorter.loss, shorter.budget_minutes) == ("softmax", 5.0)
    _, reasons = planned_settings("ComplEx", {}, *DENSE, budget_minutes=0.5, cores=2)
    assert any("30 s" in reason for reason in reasons)


@pytest.mark.parametrize("size", [SMALL, DENSE, MIDDLE, SPARSE])
def test_a_budget_is_used_to_its_end(size: tuple[int, int]) -> None:
    """How fast the machine is decides how many epochs a budget holds, not an estimate."""
    settings, reasons = planned_settings("ComplEx", {}, *size, budget_minutes=40.0, cores=2)
    assert (settings.epochs, settings.budget_minutes) == (200, 40.0)
    assert "epochs 200: training ends after 40 minutes, or when validation MRR stops rising" in reasons
    planned, _ = planned_settings("ComplEx", {"schedule": "linear"}, *size, budget_minutes=40.0, cores=2)
    assert planned.epochs <= 40  # at whose end the learning rate is 0


def test_what_is_given_stays() -> None:
    given = {"dim": 64, "epochs": 3, "regularization": 0.5}
    settings, _ = planned_settings("ComplEx", given, *DENSE, cores=2)
    assert {name: getattr(settings, name) for name in given} == given
    whole, reasons = planned_settings("ComplEx", {"loss": "whole-softmax"}, *SPARSE, cores=2)
    assert (whole, reasons) == (settings_of("ComplEx", {"loss": "whole-softmax"}), ())


@pytest.mark.parametrize("model", sorted(SCORES))
@pytest.mark.parametrize("size", [SMALL, DENSE, SPARSE])
def test_every_model_has_a_plan_for_every_size(model: str, size: tuple[int, int]) -> None:
    assert planned_settings(model, {}, *size, budget_minutes=40.0, cores=2)[0].model == model
