"""Defaults by the size of a graph: what fits a budget of time, and why it was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastable.embedding_store.native.range_pool import available_cores
from elastable.replicas.knowledge_graphs.losses import SampledSoftmax
from elastable.replicas.knowledge_graphs.scores import score_function
from elastable.replicas.knowledge_graphs.scores.kernels import Dot
from elastable.replicas.knowledge_graphs.settings import WHOLE_SOFTMAX, TrainSettings
from elastable.replicas.knowledge_graphs.training.defaults import settings_of

__all__ = ["DEFAULT_BUDGET_MINUTES", "GraphSize", "planned_settings"]

DEFAULT_BUDGET_MINUTES = 40.0
"""What the defaults are chosen for, where no budget is given."""

_PRODUCT_PACE, _DISTANCE_PACE = 60e9, 8e9  # multiplications and additions a second and core; with AVX-512 up to 170e9
_EXPONENTIAL = 60  # of one score, in the same unit
_TRAINING = 0.9  # of the budget; the rest is for evaluations
_FEWEST_EPOCHS, _MOST_EPOCHS = 20, 200
_MOST_ENTITIES = 20_000  # of whole-softmax
_NEGATIVES = 2048


@dataclass(frozen=True, slots=True)
class GraphSize:
    """Numbers of entities and training triples."""

    entities: int
    triples: int


def planned_settings(
    model: str,
    given: Mapping[str, object],
    size: GraphSize,
    budget_minutes: float | None = None,
    cores: int | None = None,
) -> tuple[TrainSettings, tuple[str, ...]]:
    """The settings of a run on a graph of a size, and what was chosen by the size, with reasons.

    Settings that are given stay. A loss that is given, or one that scores a fixed number of negatives, leaves nothing
    to choose but the end.

    Args:
        model: Name of the score function.
        given: Settings by name; None: not given.
        size: The graph's.
        budget_minutes: Time for the run; None: 40 minutes, and no end by time.
        cores: Of the machine; None: those of this process.

    Raises:
        BadInput: as `settings_of`.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if budget_minutes is not None:
        chosen["budget_minutes"] = budget_minutes
    settings = settings_of(model, chosen)
    if settings.loss != WHOLE_SOFTMAX or "loss" in chosen or settings.model not in _PLANNED:
        return settings, ()
    budget, cores = budget_minutes or DEFAULT_BUDGET_MINUTES, cores or available_cores()
    plan = _whole(settings, size, budget, cores)
    if plan is None:
        plan = _sampled(settings, size, budget, cores)
    if budget_minutes is not None and settings.schedule not in ("linear", "cosine"):
        ending = f"training ends after {_told(budget_minutes)}, or when validation MRR stops rising"
        plan["epochs"] = (_MOST_EPOCHS, ending)
    names = [name for name in plan if name not in chosen and plan[name][0] != getattr(settings, name)]
    settings = settings_of(model, {**{name: plan[name][0] for name in names}, **chosen})
    return settings, tuple(f"{name} {plan[name][0]}: {plan[name][1]}" for name in names)


_PLANNED = ("ComplEx", "DistMult", "CP", "PairRE", "TripleRE", "InterHT", "TranS", "BoxE")
"""Models whose default is whole-softmax, and whose cost is that of comparing queries with all entities."""

_Plan = dict[str, tuple[object, str]]


def _whole(settings: TrainSettings, size: GraphSize, budget: float, cores: int) -> _Plan | None:
    """Whole-softmax with the largest dimension for which 20 epochs fit; None: there is none."""
    if size.entities > _MOST_ENTITIES:
        return None
    for dim in sorted({settings.dim, 128, 64}, reverse=True):
        if dim > settings.dim:
            continue
        seconds = _epoch_seconds(replace(settings, dim=dim), size, cores)
        fit = int(_TRAINING * 60 * budget / seconds)
        if fit < _FEWEST_EPOCHS:
            continue
        took = f"an epoch takes up to {seconds:.0f} s on {cores} cores"
        return {
            "dim": (
                dim,
                f"with {settings.dim} values, {_FEWEST_EPOCHS} epochs may take longer than {_told(budget)}",
            ),
            "epochs": (min(settings.epochs, fit), f"{took}; these fit {_told(budget)}"),
        }
    return None


def _sampled(settings: TrainSettings, size: GraphSize, budget: float, cores: int) -> _Plan:
    """A sampled softmax, with the dimension of the model's defaults if all its epochs fit."""
    seconds = _epoch_seconds(settings, replace(size, entities=_NEGATIVES), cores)
    fits = settings.epochs * seconds <= _TRAINING * 60 * budget
    why = f"all {size.entities:,} entities at every step take too long; a sample corrected by its size estimates them"
    return {
        "loss": (SampledSoftmax.name, why),
        "negatives": (_NEGATIVES, "shared by the triples of a step, one matrix product"),
        "dim": (
            settings.dim if fits else min(128, settings.dim),
            f"with {settings.dim} values, {settings.epochs} epochs may take longer than {_told(budget)}",
        ),
        "evaluate_every": (4, "an evaluation scores all entities"),
    }


def _told(minutes: float) -> str:
    return f"{minutes:g} minutes" if minutes >= 1 else f"{60 * minutes:g} s"


def _epoch_seconds(settings: TrainSettings, size: GraphSize, cores: int) -> float:
    score = score_function(settings.model, settings.dim, settings.norm)
    pace = _PRODUCT_PACE if isinstance(score.comparison, Dot) else _DISTANCE_PACE
    scores = 2.0 * size.triples * size.entities  # both directions
    return scores * (6 * score.entity_width + _EXPONENTIAL) / (pace * cores)
