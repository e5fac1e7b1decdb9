"""A layer's `admission` and `eviction`: as specs, as the dicts of a layer's config, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec
from elastable.embedding_store.errors import BadSpec

__all__ = ["membership_config", "membership_spec"]

Spec = TypeVar("Spec", AdmissionSpec, EvictionSpec)


def membership_spec(layer: str, kind: type[Spec], given: object, input_dim: int | None) -> Spec | None:
    """What a layer was given for `admission` or `eviction`.

    Args:
        layer: Its name, for errors.
        kind: Of what is wanted.
        given: None, a spec of that kind, or a dict of its fields.
        input_dim: The layer's: a fixed vocabulary has neither.

    Raises:
        BadSpec: anything else, fields that cannot be, or a fixed vocabulary.
    """
    argument = "admission" if kind is AdmissionSpec else "eviction"
    told = f"embedding layer {layer!r}: {argument}"
    if given is None:
        return None
    if input_dim is not None:
        raise BadSpec(f"{told} is for tables of any ids: leave input_dim out (it is {input_dim})")
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise BadSpec(f"{told} must be None or an et.{kind.__name__}, got {given!r}")
    try:
        return kind(**given)
    except TypeError as error:
        raise BadSpec(f"{told}: {dict(given)} are no fields of et.{kind.__name__}: {error}") from error


def membership_config(spec: AdmissionSpec | EvictionSpec | None) -> dict[str, object] | None:
    """The dict that `membership_spec` understands."""
    return None if spec is None else asdict(spec)
