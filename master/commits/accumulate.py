"""Many pushes -> one: sums in micro-batch order, so that the order of arrival changes no bit. Rows: how to sum them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.shards.server_contract import RowSums, SumTerm
from elastable.embedding_store.shards.version_sums import Pushes
from elastable.master.api import AsyncPushId, Divisor, DivisorKind, GradientPart, Push, Tensor

_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The gradient of one version.

    Attributes:
        records: Records behind it; 0 where every push was skipped.
        dense: Gradient of every trainable dense variable, in model order.
        updates: Table name -> coalesced gradient, once it is committed; nothing where store servers hold them.
        states: Every non-trainable variable, in model order.
        metrics: Summed metric state; floats as float64, integers as int64.
        changed: Tables that have a gradient, once it is committed; at store servers, too.
        overflowed: Whether the gradient was not finite, and is left out for that.
        frozen: Tables that took no step, once it is committed.
    """

    records: int = 0
    dense: tuple[Tensor, ...] = ()
    updates: Mapping[str, TableUpdate] = field(default_factory=dict)
    states: tuple[Tensor, ...] = ()
    metrics: tuple[Tensor, ...] = ()
    changed: tuple[str, ...] = ()
    overflowed: bool = False
    frozen: tuple[str, ...] = ()


def accumulate(pushes: Sequence[Push], average: str) -> Accumulated:
    """One gradient out of the pushes of a version, but that of the rows; see `row_sums`.

    Every part of a push weighs as its divisor says (`elastable.master.api.DivisorKind`), in dense variables and tables
    alike, so that the sum is the gradient of one batch of all records. Sums are left folds in the order given. A state
    is the mean over records in any case; integer and boolean states are the last push's.

    Args:
        pushes: In micro-batch order; checked (`elastable.master.push_check`), all with the same kinds of divisors.
        average: What a push without a divisor means: "sum", by nothing; "batches", by the number of pushes; else, by
            records.

    Raises:
        BadInput: pushes without records.
    """
    if not pushes:
        return Accumulated()
    records = sum(push.records for push in pushes)
    if records < 1 or any(push.records < 0 for push in pushes):
        raise BadInput(f"pushes of {[push.records for push in pushes]} records: a push must have at least one")
    shares = [push.records / records for push in pushes]
    parts = _weighted_parts(pushes, average)
    states = zip(*(push.states for push in pushes), strict=True)
    metrics = add_metrics((), [push.metrics for push in pushes])
    return Accumulated(
        records=records,
        dense=tuple(
            _weighted_sum([(part.dense[place], share) for share, part in parts if place in part.dense])
            for place in range(len(pushes[0].dense))
        ),
        states=tuple(_weighted_mean(state, shares) for state in states),
        metrics=_with_losses(metrics, pushes, [part for _, part in parts]),
    )


def row_sums(version: int, pushes: Sequence[Push], average: str, frozen: Sequence[str]) -> RowSums:
    """How the shards of a job sum the rows' part of the same gradient.

    Args:
        pushes: In micro-batch order, as of `accumulate`; asynchronous ones are of one sender.
        frozen: Tables that take no step.
    """
    if not pushes:
        return RowSums(version, frozen=tuple(frozen))
    (sender,) = {push.id.incarnation if isinstance(push.id, AsyncPushId) else "" for push in pushes}
    weighted = _weighted_parts(pushes, average)
    parts = 1 + len(pushes[0].parts)
    # As `_weighted_parts` lists them: of every push the first, then of every push the second.
    names = [(_number(push), part) for part in range(parts) for push in pushes]
    terms = tuple(SumTerm(*name, share) for name, (share, _) in zip(names, weighted, strict=True))
    kinds = [pushes[0].divisor, *(part.divisor for part in pushes[0].parts)]
    once = tuple(part for part, kind in enumerate(kinds) if kind is not None and kind.kind is DivisorKind.ROWS)
    return RowSums(version, terms, once, tuple(frozen), sender)


def row_parts(pushes: Sequence[Push]) -> Pushes:
    """The rows' part of pushes that brought it here, named as `row_sums` names it."""
    return {_number(push): (push.slices, *(part.slices for part in push.parts)) for push in pushes}


def _number(push: Push) -> int:
    """What names its rows' part, besides its sender."""
    return push.id.sequence if isinstance(push.id, AsyncPushId) else push.id.micro_batch


_MEANT = {"sum": Divisor(DivisorKind.NOTHING), "batches": Divisor(DivisorKind.AMOUNT, 1.0)}


def _weighted_parts(pushes: Sequence[Push], average: str) -> list[tuple[float, GradientPart]]:
    """All parts of all pushes, with what each weighs: first of every push the first, in push order, then the second...

    Their losses are what they add to losses of the version.
    """
    meant = _MEANT.get(average, Divisor(DivisorKind.RECORDS))
    every = [
        (GradientPart(push.divisor or meant, dict(enumerate(push.dense)), losses=push.losses), *push.parts)
        for push in pushes
    ]
    records = [push.records for push in pushes]
    found: list[tuple[float, GradientPart]] = []
    for alike in zip(*every, strict=True):
        by_rows = alike[0].divisor.kind is DivisorKind.ROWS
        shares = _shares([part.divisor for part in alike], records)
        losses = _losses_of_rows(alike) if by_rows else _weighted_losses(alike, shares)
        parts = (replace(part, losses=shown) for part, shown in zip(alike, losses, strict=True))
        found += zip(shares, parts, strict=True)
    return found


def _weighted_losses(parts: Sequence[GradientPart], shares: Sequence[float]) -> list[Mapping[int, float]]:
    """What each part adds to losses. A mean of no values may be NaN; it counts where all of them are of none."""
    if not any(shares):
        return [parts[0].losses, *({} for _ in parts[1:])]
    return [
        {place: share * value for place, value in part.losses.items()} if share else {}
        for part, share in zip(parts, shares, strict=True)
    ]


def _losses_of_rows(parts: Sequence[GradientPart]) -> list[Mapping[int, float]]:
    """What the parts add to losses together, with the first of them: each row of the version once."""
    total = 0.0
    for table in dict.fromkeys(table for part in parts for table in part.penalties):
        given = [part.penalties[table] for part in parts if table in part.penalties]
        _, first = np.unique(np.concatenate([rows.indices for rows in given]), return_index=True)
        total += float(np.concatenate([rows.values for rows in given])[first].sum(dtype=np.float64))
    return [dict.fromkeys(parts[0].losses, total), *({} for _ in parts[1:])]


def _shares(divisors: Sequence[Divisor], records: Sequence[int]) -> list[float]:
    kind = divisors[0].kind
    if kind in (DivisorKind.NOTHING, DivisorKind.ROWS):
        return [1.0] * len(divisors)
    amounts = [float(count) for count in records]
    if kind is DivisorKind.AMOUNT:
        amounts = [divisor.amount for divisor in divisors]
    total = sum(amounts)
    # As Keras: what is divided by no weight at all is zero.
    return [amount / total if total else 0.0 for amount in amounts]


def _with_losses(
    metrics: tuple[Tensor, ...], pushes: Sequence[Push], parts: Sequence[GradientPart]
) -> tuple[Tensor, ...]:
    """Metric totals of losses as one batch of all records would have counted them.

    The total of a mean is followed by its count.
    """
    changed = list(metrics)
    for place in dict.fromkeys(place for part in parts for place in part.losses):
        loss = sum(part.losses[place] for part in parts if place in part.losses)
        if place in pushes[0].once:
            changed[place + 1] = pushes[0].metrics[place + 1].astype(np.float64)
        changed[place] = np.float64(loss) * changed[place + 1]
    return tuple(changed)


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


def _weighted_sum(parts: Sequence[tuple[Tensor, float]]) -> Tensor:
    """The sum of arrays times their shares, as a left fold; of their dtype, in float32 at least until it is made."""
    first = parts[0][0]
    wide = np.result_type(first.dtype, np.float32)
    flat = [(np.ascontiguousarray(part).reshape(-1), wide.type(share)) for part, share in parts]
    total: Tensor = np.empty(first.size, first.dtype)
    # By blocks that stay in the processor's cache, so that each array passes through memory once.
    block, product = np.empty(min(_BLOCK, first.size), wide), np.empty(min(_BLOCK, first.size), wide)
    for start in range(0, first.size, _BLOCK):
        stop = min(start + _BLOCK, first.size)
        here, times = block[: stop - start], product[: stop - start]
        np.multiply(flat[0][0][start:stop], flat[0][1], out=here, dtype=wide)
        for part, share in flat[1:]:
            np.multiply(part[start:stop], share, out=times, dtype=wide)
            here += times
        total[start:stop] = here
    return total.reshape(first.shape)
