"""The settings of training as options of commands: their defaults are the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, OptionField, option_fields
from elastable.replicas.knowledge_graphs.graph import HEADERS, GraphSource
from elastable.replicas.knowledge_graphs.scores import SCORES
from elastable.replicas.knowledge_graphs.settings import TrainSettings, default_settings

__all__ = ["CHOSEN", "HEADER", "MODEL", "with_header"]

HEADER = Option(
    "Whether the first line of text and CSV files names the columns; auto: if its words are names of columns and on no "
    "other line.",
    choices=HEADERS,
    unset="auto for text, yes for CSV",
)
"""The option `--header`."""


def with_header(dataset: str, header: str | None) -> str:
    """The graph, with what `--header` says about its files; None: nothing is said.

    Raises:
        BadInput: the graph's name says something else, or its format has no headers.
    """
    if header is None:
        return dataset
    source = GraphSource.parse(dataset)
    if source.header not in ("auto", header):
        raise BadInput(f"--header {header}, but {dataset} says header={source.header}")
    return str(source.with_header(header))


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
