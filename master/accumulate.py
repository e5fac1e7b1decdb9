"""Many pushes -> one: sums in micro-batch order, so that the order of arrival changes no bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.store import TableUpdate
from elastable.embedding_store.tables.grouping import coalesce_many
from elastable.master.api import Push, Tensor

__all__ = ["Accumulated", "accumulate", "add_metrics"]


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The gradient of one version.

    Attributes:
        records: Records behind it; 0 where every push was skipped.
        dense: Gradient of every trainable dense variable, in model order.
        updates: Table name -> coalesced gradient.
        states: Every non-trainable variable, in model order.
        metrics: Summed metric state; floats as float64, integers as int64.
    """

    records: int = 0
    dense: tuple[Tensor, ...] = ()
    updates: Mapping[str, TableUpdate] = field(default_factory=dict)
    states: tuple[Tensor, ...] = ()
    metrics: tuple[Tensor, ...] = ()


def accumulate(pushes: Sequence[Push], average: str) -> Accumulated:
    """One gradient out of the pushes of a version.

    With "mean", the gradient of a push weighs records / all records, in dense
    variables and tables alike; with "sum", it weighs 1. Sums are left folds
    in the order given. A state is the mean over records in both cases;
    integer and boolean states are the last push's.

    Args:
        pushes: In micro-batch order; checked (`elastable.master.push_check`).
        average: "mean" or "sum".

    Raises:
        BadInput: "mean" of pushes without records.
    """
    if not pushes:
        return Accumulated()
    records = sum(push.records for push in pushes)
    if records < 1 or any(push.records < 0 for push in pushes):
        raise BadInput(f"pushes of {[push.records for push in pushes]} records: a push must have at least one")
    shares = [push.records / records for push in pushes]
    scales = shares if average == "mean" else [1.0] * len(pushes)
    dense = zip(*(push.dense for push in pushes), strict=True)
    states = zip(*(push.states for push in pushes), strict=True)
    return Accumulated(
        records=records,
        dense=tuple(_weighted_sum(parts, scales) for parts in dense),
        updates=_table_updates(pushes, scales),
        states=tuple(_weighted_mean(parts, shares) for parts in states),
        metrics=add_metrics((), [push.metrics for push in pushes]),
    )


def add_metrics(total: tuple[Tensor, ...], parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Metric state summed in the order given, floats in float64 and integers in int64.

    float32, in which Keras counts, stops counting at 2**24.

    Args:
        total: The sum so far; () to begin.
        parts: Metric states, each from reset.
    """
    sums = list(total)
    for part in parts:
        wide = [tensor.astype(np.float64 if tensor.dtype.kind == "f" else np.int64) for tensor in part]
        sums = wide if not sums else [one + other for one, other in zip(sums, wide, strict=True)]
    return tuple(sums)


def _table_updates(pushes: Sequence[Push], scales: Sequence[float]) -> dict[str, TableUpdate]:
    # By name: the order in which a push happens to list its tables must not show.
    tables = sorted({table for push in pushes for table in push.slices})
    updates = {}
    for table in tables:
        parts = [
            (push.slices[table].indices, push.slices[table].values, scale)
            for push, scale in zip(pushes, scales, strict=True)
            if table in push.slices
        ]
        update = coalesce_many(parts)
        if len(update.ids):
            updates[table] = update
    return updates


def _weighted_sum(parts: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    wide = np.result_type(parts[0].dtype, np.float32)
    total: Tensor = parts[0].astype(wide) * wide.type(scales[0])
    for part, scale in zip(parts[1:], scales[1:], strict=True):
        total += part.astype(wide, copy=False) * wide.type(scale)
    return total.astype(parts[0].dtype, copy=False)


def _weighted_mean(parts: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    first = parts[0]
    if first.dtype.kind != "f":
        return parts[-1]
    wide = np.result_type(first.dtype, np.float32)
    # As differences from the first: states that are equal (frozen weights) stay so to the bit.
    moved = np.zeros(first.shape, wide)
    for part, share in zip(parts[1:], shares[1:], strict=True):
        moved += (part.astype(wide, copy=False) - first) * wide.type(share)
    mean: Tensor = (first + moved).astype(first.dtype, copy=False)
    return mean
