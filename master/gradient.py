"""What a worker pushes: the gradient of a micro-batch, and what its loss was divided by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.shards import Slices

__all__ = [
    "AsyncPushId",
    "Divisor",
    "DivisorKind",
    "GradientPart",
    "Push",
    "PushId",
    "Slices",
    "SyncPushId",
    "Tensor",
]

Tensor = Array


@dataclass(frozen=True, slots=True)
class SyncPushId:
    """Names a push by what it computed: duplicates have the same name."""

    version: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class AsyncPushId:
    """Names a push by who sent it; `micro_batch` is -1 where it belongs to no task."""

    incarnation: str
    sequence: int
    micro_batch: int = -1


PushId = SyncPushId | AsyncPushId


class DivisorKind(StrEnum):
    """What a micro-batch divided terms of its loss by, and so how much it weighs in its version.

    `RECORDS`: as many as it has records. `NOTHING`: they are sums; every
    micro-batch weighs 1. `AMOUNT`: a separate number, of weights or of what a
    mask let through. `ROWS`: they are of rows, and not of records: each row that
    the version touches counts once.
    """

    RECORDS = "records"
    NOTHING = "nothing"
    AMOUNT = "amount"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Divisor:
    """A divisor; with `AMOUNT` that number, which is finite and not negative."""

    kind: DivisorKind
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class GradientPart:
    """The gradient of those terms of a micro-batch's loss that are divided alike.

    Attributes:
        divisor: What they were divided by; the gradient is of the quotient.
        dense: Place of a trainable variable in model order -> its gradient; the others have none.
        slices: Table name -> IndexedSlices.
        losses: Place of a metric's total among `Push.metrics` -> the mean that these terms add to it; of `ROWS` only
            the places count.
        penalties: Of `ROWS`: table name -> the rows, and float32 `[n, 1]` what each adds to the loss.
    """

    divisor: Divisor
    dense: Mapping[int, Tensor] = field(default_factory=dict)
    slices: Mapping[str, Slices] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    penalties: Mapping[str, Slices] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Push:
    """The report of one micro-batch.

    Attributes:
        id: What makes it countable once.
        records: Records in the micro-batch: its weight in the mean.
        dense: Gradient of every trainable dense variable, in model order.
        slices: Table name -> IndexedSlices.
        states: Every non-trainable variable after the micro-batch, in model order.
        metrics: Keras metric state of this micro-batch alone (from reset), flat.
        job: The job it was computed for; "": whichever the master runs.
        computed_on: Async: the version of the dense variables it was computed
            on; None: unknown, and taken for fresh.
        incarnation: Sync: the worker that computed it, for the status; "":
            the holder of the lease.
        divisor: What the terms behind `dense` and `slices` were divided by;
            None: as the job's `average` says, by records or by nothing.
        losses: See `GradientPart`; of those terms.
        parts: The gradients of terms that were divided by something else.
        not_finite: Where rows go to store servers: why one of them refused those of this push, which held NaN or Inf;
            "": it was not refused.
        once: Those places of `losses`, here and in `parts`, whose count is of a batch, however many records it has: a
            version counts as one micro-batch does.
    """

    id: PushId
    records: int
    dense: tuple[Tensor, ...] = ()
    slices: Mapping[str, Slices] = field(default_factory=dict)
    states: tuple[Tensor, ...] = ()
    metrics: tuple[Tensor, ...] = ()
    job: str = ""
    computed_on: int | None = None
    incarnation: str = ""
    divisor: Divisor | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    parts: tuple[GradientPart, ...] = ()
    not_finite: str = ""
    once: tuple[int, ...] = ()
