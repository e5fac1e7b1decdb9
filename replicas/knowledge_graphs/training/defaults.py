"""Default settings of each model, found on CoDEx-S."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.losses import SampledSoftmax
from elastable.replicas.knowledge_graphs.scores import SCORES, score_function
from elastable.replicas.knowledge_graphs.settings import WHOLE_LOSSES, TrainSettings

__all__ = ["default_settings", "settings_of"]

_PRODUCT: Mapping[str, object] = {
    "dim": 256,
    "loss": "whole-softmax",
    "optimizer": "adagrad",
    "learning_rate": 0.1,
    "regularizer": "n3",
    "regularization": 0.003,
    "batch": 512,
    "epochs": 40,
    "spread": 0.01,
}
_SAMPLED: Mapping[str, object] = {
    "dim": 256,
    "norm": 2,
    "loss": "softmax",
    "negatives": 64,
    "shared": False,
    "optimizer": "adagrad",
    "learning_rate": 0.05,
    "batch": 256,
    "epochs": 60,
    "evaluate_every": 5,
    "spread": 0.03,
}
_DISTANCE: Mapping[str, object] = {
    "dim": 128,
    "loss": "whole-softmax",
    "optimizer": "adam",
    "learning_rate": 0.003,
    "batch": 512,
    "epochs": 40,
}

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "ComplEx": _PRODUCT,
    "DistMult": _PRODUCT,
    "CP": _PRODUCT,
    "TransE": _SAMPLED,
    "RotatE": {name: value for name, value in _SAMPLED.items() if name != "norm"},
    "PairRE": _DISTANCE,
    "TripleRE": _DISTANCE,
    "InterHT": _DISTANCE,
    "TranS": _DISTANCE,
    "BoxE": {**_DISTANCE, "dim": 64},
    "TuckER": {**_DISTANCE, "dim": 100, "learning_rate": 0.001},
    "ConvE": {**_DISTANCE, "dim": 200, "learning_rate": 0.001},
}


def default_settings(model: str) -> dict[str, object]:
    """The defaults of a model, by names of `TrainSettings`. Raises BadInput for an unknown model."""
    name = {known.lower(): known for known in SCORES}.get(model.lower())
    if name is None:
        name = score_function(model, 2).name  # raises BadInput with the known names
    return {"model": name, **_DEFAULTS[name]}


def settings_of(model: str, given: Mapping[str, object]) -> TrainSettings:
    """The settings of a run: the given ones (None: not given), then the model's defaults.

    Raises:
        BadInput: as `TrainSettings`; a given one has no effect with the others.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = TrainSettings.from_json({**default_settings(model), **chosen})
    for names, idle, why in _IDLE:
        for name in names:
            if name in chosen and idle(settings):
                raise BadInput(f"{name}={chosen[name]!r} has no effect {why.format(settings)}; leave it out")
    return settings


_IDLE: tuple[tuple[tuple[str, ...], Callable[[TrainSettings], bool], str], ...] = (
    (
        ("negatives", "shared", "candidates", "filtered", "scheme"),
        lambda settings: settings.loss in WHOLE_LOSSES,
        "on the loss {0.loss}, which scores all entities",
    ),
    (
        ("margin", "adversarial"),
        lambda settings: settings.loss in (*WHOLE_LOSSES, SampledSoftmax.name),
        "on the loss {0.loss}",
    ),
    (("corruption",), lambda settings: settings.reciprocal, "with reciprocal relations, whose queries ask for tails"),
    (("decay",), lambda settings: settings.schedule != "exponential", "on the schedule {0.schedule}"),
    (("regularization",), lambda settings: settings.regularizer == "none", "without a regularizer"),
)
"""Settings, when they change nothing, and why."""
