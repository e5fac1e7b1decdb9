"""Refusing what does not fit a store as it stands: another spec, another version."""

from __future__ import annotations

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import FutureVersion, SpecConflict, StaleVersion

__all__ = ["refuse_conflict", "refuse_other_version"]


def refuse_conflict(ours: TableSpec, theirs: TableSpec) -> None:
    """Raises `SpecConflict` where a table is declared again with another spec."""
    differences = ours.differences(theirs)
    if differences:
        told = "; ".join(f"{name} is {mine!r}, not {other!r}" for name, (mine, other) in differences.items())
        raise SpecConflict(f"table {ours.name!r} already exists with another spec: {told}")


def refuse_other_version(current: int, wanted: int | None) -> None:
    """Raises unless `wanted` is None or the current version."""
    if wanted is None or wanted == current:
        return
    if wanted < current:
        raise StaleVersion(f"version {wanted} is past; the current version is {current}")
    raise FutureVersion(f"version {wanted} is not committed yet; the current version is {current}")
