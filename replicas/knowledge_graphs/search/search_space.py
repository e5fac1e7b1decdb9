"""The settings that a search tries, and the values that each may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastable.embedding_store.contract.malformed import Document, DocumentFields
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import option_fields
from elastable.replicas.knowledge_graphs.settings import WHOLE_LOSSES, TrainSettings
from elastable.replicas.knowledge_graphs.training.defaults import settings_of

if TYPE_CHECKING:
    from optuna import Trial

__all__ = ["SearchSpace", "default_space"]

_BOUNDS = {"low", "high", "log", "step"}


@dataclass(frozen=True)
class SearchSpace:
    """Values by the name of a setting: a list of choices, or bounds {"low", "high"} with "log": true or a "step".

    Whole numbers as bounds give whole numbers. Settings that are not here are the same in every trial.

    Raises:
        BadInput: no setting, an unknown one, or values that cannot be.
    """

    values: DocumentFields

    def __post_init__(self) -> None:
        known = option_fields(TrainSettings)
        if not self.values:
            raise BadInput("a search space names at least one setting")
        for name, given in self.values.items():
            if name not in known or name == "model":
                raise BadInput(f"search space: there is no setting {name!r}; there are {', '.join(known)}")
            if isinstance(given, list):
                if not given or not all(known[name].accepts(value) for value in given):
                    raise BadInput(f"search space: {name} is one of {given}, and {known[name].wanted}")
            else:
                _check_bounds(name, given)

    @classmethod
    def load(cls, file: Path) -> SearchSpace:
        """Reads a JSON file. Raises BadInput for a missing or malformed one."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(f"{file}: not a JSON file of a search space ({error})") from error
        if not isinstance(values, dict):
            raise BadInput(f"{file}: a search space is a JSON object of settings and their values")
        return cls(values)

    def suggest(self, trial: Trial) -> dict[str, object]:
        """One value of each setting, as Optuna suggests them."""
        found: dict[str, object] = {}
        for name, given in self.values.items():
            if isinstance(given, list):
                found[name] = trial.suggest_categorical(name, given)
            elif isinstance(given["low"], int) and isinstance(given["high"], int):
                step, log = given.get("step", 1), given.get("log", False)
                found[name] = trial.suggest_int(name, given["low"], given["high"], step=step, log=log)
            else:
                found[name] = trial.suggest_float(
                    name, given["low"], given["high"], step=given.get("step"), log=given.get("log", False)
                )
        return found


def default_space(model: str, fixed: Mapping[str, object]) -> SearchSpace:
    """What to try for a model: learning rate, dimension, batch, and the regularizer's weight or the negatives.

    Args:
        model: Name of the model.
        fixed: Settings that the user has given; they are not varied.

    Raises:
        BadInput: everything is fixed.
    """
    default = settings_of(model, {**fixed})
    rate, dim = default.learning_rate, default.dim
    values: Document = {
        "learning_rate": {"low": rate / 10, "high": rate * 5, "log": True},
        "dim": sorted({max(2, dim // 4), dim // 2, dim} - {0}),
        "batch": [128, 256, 512, 1024],
    }
    if default.regularizer != "none":
        values["regularization"] = {"low": 1e-4, "high": 0.1, "log": True}
    if default.loss not in WHOLE_LOSSES:
        values["negatives"] = [32, 64, 128, 256]
    return SearchSpace({name: value for name, value in values.items() if name not in fixed})


def _check_bounds(name: str, given: object) -> None:
    if not isinstance(given, dict) or not {"low", "high"} <= set(given) <= _BOUNDS:
        raise BadInput(f'search space: {name} needs a list of values, or {{"low": A, "high": B}} with "log" or "step"')
    low, high, log, step = given["low"], given["high"], given.get("log", False), given.get("step")
    numbers = [low, high] + ([] if step is None else [step])
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers) or low > high:
        raise BadInput(f"search space: {name} is from {low!r} to {high!r}; give two numbers, the lower first")
    if not isinstance(log, bool) or (log and (low <= 0 or step is not None)) or (step is not None and step <= 0):
        raise BadInput(f"search space: {name} on a logarithmic scale starts above 0 and has no step; a step is above 0")
