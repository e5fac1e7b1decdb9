"""The settings of training as options of commands: their defaults are the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastable.embedding_store.option import OptionField, option_fields
from elastable.replicas.knowledge_graphs.scores import SCORES
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from elastable.replicas.knowledge_graphs.training.defaults import default_settings

__all__ = ["CHOSEN", "MODEL"]


def _default_by_model(field: OptionField) -> OptionField:
    """The option of a setting of `TrainSettings` whose default the model decides."""
    defaults = [default_settings(name).get(field.name, field.default) for name in (_DEFAULT_MODEL, *SCORES)]
    first = defaults[0] if defaults[0] is not None else field.option.unset
    shown = field.words(first)[0] if isinstance(first, bool) else str(first)
    same = all(default == defaults[0] for default in defaults)
    unset = shown if same else f"{shown} for {_DEFAULT_MODEL}; other models differ"
    return replace(field, default=None, option=replace(field.option, unset=unset))


_SETTINGS = dict(option_fields(TrainSettings))
MODEL: OptionField = _SETTINGS.pop("model")
"""The option `--model`."""

_DEFAULT_MODEL = str(MODEL.default)
CHOSEN: Mapping[str, OptionField] = {name: _default_by_model(field) for name, field in _SETTINGS.items()}
"""The options of all other settings by name; None: not given."""
