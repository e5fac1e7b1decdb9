"""Which serialised Keras objects are made here: optimizers and learning-rate schedules, and nothing else.

A table's spec may come from any client. Keras makes whatever a config names, a
`Dense` layer of gigabytes as well, and runs the constructor of any registered
class. So every object within a config is checked before Keras sees it.
"""

from __future__ import annotations

import json

import keras

__all__ = ["optimizer_config"]

_MOST_BYTES = 64 << 10
_DEEPEST = 8
_MOST_TURNS = 100
_TURNS = ("ns_steps",)
"""Of loops that Keras writes out turn by turn: those of Muon, which takes 5."""
_KEPT = ("module", "class_name", "config", "registered_name")
"""What `keras.saving.serialize_keras_object` writes, without shapes to build by."""


def optimizer_config(text: str) -> dict[str, object]:
    """The config of an optimizer, with nothing in it that is not one or a schedule.

    Args:
        text: JSON, as of `OptimizerSpec.keras_config`.

    Raises:
        ValueError: it is something else, or too large; says what.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{len(text)} characters; the most are {_MOST_BYTES}")
    config = json.loads(text)
    if not isinstance(config, dict) or not issubclass(_class_of(config), keras.optimizers.Optimizer):
        raise ValueError("it names no optimizer")
    return _allowed(config, 0)


def _allowed(config: dict[str, object], depth: int) -> dict[str, object]:
    _class_of(config)
    return {key: _checked(config[key], depth + 1) for key in _KEPT if key in config}


def _checked(value: object, depth: int) -> object:
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        if "class_name" in value or "__class_name__" in value:
            return _allowed(value, depth)
        for key in _TURNS:
            if not (isinstance(turns := value.get(key, 0), int) and turns <= _MOST_TURNS):
                raise ValueError(f"{key}={turns!r:.100}; the most are {_MOST_TURNS}")
        return {key: _checked(held, depth + 1) for key, held in value.items()}
    if isinstance(value, list):
        return [_checked(held, depth + 1) for held in value]
    return value


def _class_of(config: dict[str, object]) -> type:
    """The class that a config names; one of Keras' own, or one that was registered in this process."""
    name, module, registered = (config.get(key) for key in ("class_name", "module", "registered_name"))
    kinds = (keras.optimizers.Optimizer, keras.optimizers.schedules.LearningRateSchedule)
    found: object = None
    if isinstance(name, str) and module in ("keras.optimizers", "keras.optimizers.schedules"):
        found = getattr(keras.optimizers.schedules if module.endswith("schedules") else keras.optimizers, name, None)
    if found is None and isinstance(registered, str):
        found = keras.saving.get_registered_object(registered)
    if not (isinstance(found, type) and issubclass(found, kinds)):
        raise ValueError(f"{str(name)[:100]!r} is no optimizer or learning-rate schedule that is known here")
    return found
