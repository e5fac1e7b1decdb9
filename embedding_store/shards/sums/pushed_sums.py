"""Row gradients of many pushes summed in the order given, by whoever holds them: a job's master, or a store server."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.shards.row_pushes import RowSums, Slices, TableClip
from elastable.embedding_store.tables import coalesce_many

__all__ = ["clipped_update", "each_row_once", "sum_pushes", "table_updates"]


def sum_pushes(sums: RowSums, pushes: Mapping[int, Sequence[Mapping[str, Slices]]]) -> dict[str, TableUpdate]:
    """The gradient of a version.

    Args:
        sums: What it is made of.
        pushes: By micro-batch, the parts of its push: table name -> gradient.
    """
    parts = [pushes[term.micro_batch][term.part] for term in sums.terms]
    for part in sums.rows_once:
        places = [place for place, term in enumerate(sums.terms) if term.part == part]
        for place, fresh in zip(places, each_row_once([parts[place] for place in places]), strict=True):
            parts[place] = fresh
    return table_updates(parts, [term.share for term in sums.terms], sums.frozen)


def each_row_once(parts: Sequence[Mapping[str, Slices]]) -> list[Mapping[str, Slices]]:
    """The slices without rows that an earlier push has: they are equal there, as all are of one version."""
    seen: dict[str, Int64] = {}
    kept: list[Mapping[str, Slices]] = []
    for part in parts:
        fresh = {}
        for table, slices in part.items():
            before = seen.get(table, np.zeros(0, np.int64))
            new = ~np.isin(slices.indices, before)
            seen[table] = np.concatenate([before, slices.indices[new]])
            fresh[table] = Slices(slices.indices[new], slices.values[new])
        kept.append(fresh)
    return kept


def table_updates(
    parts: Sequence[Mapping[str, Slices]], shares: Sequence[float], frozen: Collection[str] = ()
) -> dict[str, TableUpdate]:
    """The summed gradient of every table that has one.

    Args:
        parts: Table name -> gradient; in the order in which they are summed.
        shares: What each part is multiplied by.
        frozen: Tables that are left out.
    """
    # By name: the order in which a push happens to list its tables must not show.
    tables = sorted({table for part in parts for table in part}.difference(frozen))
    updates = {}
    for table in tables:
        update = coalesce_many(
            [
                (part[table].indices, part[table].values, share)
                for part, share in zip(parts, shares, strict=True)
                if table in part
            ]
        )
        if len(update.ids):
            updates[table] = update
    return updates


def clipped_update(update: TableUpdate, clip: TableClip) -> TableUpdate:
    """The gradient of a table, clipped."""
    gradients = update.gradients
    if clip.scale != 1.0:
        gradients = gradients * np.float32(clip.scale)
    if clip.bound is not None:
        gradients = np.clip(gradients, np.float32(-clip.bound), np.float32(clip.bound))
    return TableUpdate(update.ids, gradients)
