"""Table specs as JSON, and back without loss."""

from __future__ import annotations

import json
from dataclasses import asdict

from elastable.embedding_store.contract.malformed import MALFORMED, Document
from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ShardOrigin,
    TableSpec,
)
from elastable.embedding_store.errors import BadSpec

__all__ = ["spec_from_json", "spec_to_json"]

_PLAIN = TableSpec("plain", 1)
_PARTS = {"admission": AdmissionSpec, "eviction": EvictionSpec}


def spec_to_json(spec: TableSpec) -> str:
    """The spec as one JSON object; equal specs give equal text.

    What a table does not have (admission, eviction, ids of strings, an origin, rows that follow every step) is
    left out.
    """
    return json.dumps(_fields(spec), sort_keys=True)


def spec_from_json(text: str | bytes) -> TableSpec:
    """The spec that `spec_to_json` wrote.

    Raises:
        BadSpec: the text is no table spec.
    """
    try:
        spec = _spec(json.loads(text))
        hash(spec)  # a TypeError where a list or an object stands in place of a value
        return spec
    except MALFORMED as error:
        raise BadSpec(f"{text[:200]!r} is no table spec: {error}") from error


def _fields(spec: TableSpec) -> Document:
    fields = asdict(spec)
    for name in ("admission", "eviction", "ids", "origin"):
        if getattr(spec, name) == getattr(_PLAIN, name):
            del fields[name]
    if spec.eviction is not None and spec.eviction.ttl is None:
        del fields["eviction"]["ttl"]  # as releases without it wrote it
    if spec.optimizer.lazy:
        del fields["optimizer"]["lazy"]
    if "origin" in fields:
        table, origin = spec.origin.table, fields["origin"]
        if table is None:
            del origin["table"], origin["shards"]
        else:
            origin["table"] = _fields(table)
    return fields


def _spec(fields: Document) -> TableSpec:
    optimizer = fields["optimizer"]
    pairs = tuple((str(name), float(value)) for name, value in optimizer["hyperparameters"])
    return TableSpec(
        **{
            **fields,
            "initializer": InitializerSpec(**fields["initializer"]),
            "optimizer": OptimizerSpec(
                optimizer["name"], pairs, optimizer["keras_config"], bool(optimizer.get("lazy", True))
            ),
            **{name: kind(**fields[name]) for name, kind in _PARTS.items() if name in fields},
            **({"origin": _origin(fields["origin"])} if "origin" in fields else {}),
        }
    )


def _origin(fields: Document) -> ShardOrigin:
    table = fields.get("table")
    return ShardOrigin(**{**fields, "table": None if table is None else _spec(table)})
