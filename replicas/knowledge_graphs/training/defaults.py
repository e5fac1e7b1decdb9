"""Settings that a model is trained by where a person says nothing; found on CoDEx-S."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastable.replicas.knowledge_graphs.scores import SCORES, score_function
from elastable.replicas.knowledge_graphs.settings import TrainSettings

__all__ = ["default_settings", "settings_of"]

_PRODUCT: Mapping[str, Any] = {
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
_SAMPLED: Mapping[str, Any] = {
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
_DISTANCE: Mapping[str, Any] = {
    "dim": 128,
    "loss": "whole-softmax",
    "optimizer": "adam",
    "learning_rate": 0.003,
    "batch": 512,
    "epochs": 40,
}

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ComplEx": _PRODUCT,
    "DistMult": _PRODUCT,
    "TransE": _SAMPLED,
    "RotatE": {**_SAMPLED, "spread": 0.03},
    "PairRE": _DISTANCE,
    "TripleRE": _DISTANCE,
    "InterHT": _DISTANCE,
    "TranS": _DISTANCE,
    "BoxE": {**_DISTANCE, "dim": 64},
    "ConvE": {**_DISTANCE, "dim": 200, "learning_rate": 0.001},
}


def default_settings(model: str) -> dict[str, Any]:
    """The defaults of a model, by names of `TrainSettings`.

    Raises:
        BadInput: there is no such model; names those there are.
    """
    name = {known.lower(): known for known in SCORES}.get(model.lower())
    if name is None:
        name = score_function(model, 2).name  # raises, and says which there are
    return {"model": name, **_DEFAULTS[name]}


def settings_of(model: str, given: Mapping[str, Any]) -> TrainSettings:
    """The settings of a run: what was given, over the model's defaults.

    Args:
        model: Its name.
        given: By names of `TrainSettings`; None stands for what was not given.

    Raises:
        BadInput: as `TrainSettings`.
    """
    said = {name: value for name, value in given.items() if value is not None}
    return TrainSettings(**{**default_settings(model), **said})
