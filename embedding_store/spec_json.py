"""Table specs as JSON, and back without loss."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from embedding_store.errors import BadSpec
from embedding_store.spec import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, ShardOrigin, TableSpec

__all__ = ["spec_from_json", "spec_to_json"]

_PLAIN = TableSpec("plain", 1)
_PARTS = {"admission": AdmissionSpec, "eviction": EvictionSpec, "origin": ShardOrigin}


def spec_to_json(spec: TableSpec) -> str:
    """The spec as one JSON object; equal specs give equal text.

    What a table does not have (admission, eviction, an origin) is left out.
    """
    fields = asdict(spec)
    for name in ("admission", "eviction", "origin"):
        if getattr(spec, name) == getattr(_PLAIN, name):
            del fields[name]
    return json.dumps(fields, sort_keys=True)


def spec_from_json(text: str | bytes) -> TableSpec:
    """The spec that `spec_to_json` wrote.

    Raises:
        BadSpec: the text is no table spec.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        optimizer = fields["optimizer"]
        pairs = tuple((str(name), float(value)) for name, value in optimizer["hyperparameters"])
        return TableSpec(
            **{
                **fields,
                "initializer": InitializerSpec(**fields["initializer"]),
                "optimizer": OptimizerSpec(optimizer["name"], pairs, optimizer["keras_config"]),
                **{name: kind(**fields[name]) for name, kind in _PARTS.items() if name in fields},
            }
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadSpec(f"{text[:200]!r} is no table spec: {error}") from error
