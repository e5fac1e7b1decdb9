"""Many pushes -> one: sums in micro-batch order, so that the order of arrival changes no bit. Rows: how to sum them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

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
    counts = list(map(attrgetter("records"), pushes))
    records = sum(counts)
    if records < 1 or min(counts) < 0:
        raise BadInput(f"pushes of {counts} records: a push must have at least one")
    parts = _weighted_parts(pushes, average)
    dense, states = [], []
    for place in range(len(pushes[0].dense)):
        dense.append(_weighted_sum([(part.dense[place], share) for share, part in parts if place in part.dense]))
    for state in zip(*map(attrgetter("states"), pushes), strict=True):
        states.append(_weighted_mean(state, [count / records for count in counts]))
    metrics = _with_losses(add_metrics((), list(map(attrgetter("metrics"), pushes))), pushes, parts)
    return Accumulated(records, tuple(dense), states=tuple(states), metrics=metrics)


def row_sums(version: int, pushes: Sequence[Push], average: str, frozen: Sequence[str]) -> RowSums:
    """How the shards of a job sum the rows' part of the same gradient.

    Args:
        pushes: In micro-batch order, as of `accumulate`; asynchronous ones are of one sender.
        frozen: Tables that take no step.
    """
    if not pushes:
        return RowSums(version, frozen=tuple(frozen))
    terms, once = [], []
    for place, (share, gradient) in enumerate(_weighted_parts(pushes, average)):
        part, number = divmod(place, len(pushes))
        terms.append(SumTerm(_number(pushes[number]), part, share))
        if number == 0 and gradient.divisor.kind is DivisorKind.ROWS:
            once.append(part)
    sender = pushes[0].id.incarnation if isinstance(pushes[0].id, AsyncPushId) else ""
    return RowSums(version, tuple(terms), tuple(once), tuple(frozen), sender)


def row_parts(pushes: Sequence[Push]) -> Pushes:
    """The rows' part of pushes that brought it here, named as `row_sums` names it."""
    found = {}
    for push in pushes:
        parts = found[_number(push)] = [push.slices]
        for part in push.parts:
            parts.append(part.slices)
    return found


def _number(push: Push) -> int:
    """What names its rows' part, besides its sender."""
    return push.id.sequence if isinstance(push.id, AsyncPushId) else push.id.micro_batch


_MEANT = {"sum": Divisor(DivisorKind.NOTHING), "batches": Divisor(DivisorKind.AMOUNT, 1.0)}


def _weighted_parts(pushes: Sequence[Push], average: str) -> list[tuple[float, GradientPart]]:
    """All parts of all pushes, with what each weighs: first of every push the first, in push order, then the second...

    Their losses are what they add to losses of the version.
    """
    meant = _MEANT.get(average, Divisor(DivisorKind.RECORDS))
    every = []
    for push in pushes:
        first = GradientPart(push.divisor or meant, dict(enumerate(push.dense)), losses=push.losses)
        every.append((first, *push.parts))
    found: list[tuple[float, GradientPart]] = []
    for alike in zip(*every, strict=True):
        shares, losses = _shares(alike, pushes), alike[0].losses
        if by_rows := alike[0].divisor.kind is DivisorKind.ROWS:
            losses = dict.fromkeys(losses, _penalty(alike))
        # A mean of no values may be NaN; it counts where all of them are of none.
        whole = by_rows or not any(shares)
        for share, part in zip(shares, alike, strict=True):
            if not whole:
                losses = {place: share * value for place, value in part.losses.items()} if share else {}
            found.append((share, replace(part, losses=losses)))
            if whole:
                losses = {}  # the first has all
    return found


def _penalty(parts: Sequence[GradientPart]) -> float:
    """What the parts' rows add to a loss together: each row of the version once."""
    total = 0.0
    for table in dict.fromkeys(table for part in parts for table in part.penalties):
        given = [part.penalties[table] for part in parts if table in part.penalties]
        _, first = np.unique(np.concatenate([rows.indices for rows in given]), return_index=True)
        total += float(np.concatenate([rows.values for rows in given])[first].sum(dtype=np.float64))
    return total


def _shares(parts: Sequence[GradientPart], pushes: Sequence[Push]) -> list[float]:
    """What the parts, one of each push and divided alike, weigh."""
    kind = parts[0].divisor.kind
    if kind in (DivisorKind.NOTHING, DivisorKind.ROWS):
        return [1.0] * len(parts)
    amounts = []
    for part, push in zip(parts, pushes, strict=True):
        amounts.append(part.divisor.amount if kind is DivisorKind.AMOUNT else float(push.records))
    total = sum(amounts)
    # As Keras: what is divided by no weight at all is zero.
    return [amount / total if total else 0.0 for amount in amounts]


def _with_losses(
    metrics: tuple[Tensor, ...], pushes: Sequence[Push], parts: Sequence[tuple[float, GradientPart]]
) -> tuple[Tensor, ...]:
    """Metric totals of losses as one batch of all records would have counted them.

    The total of a mean is followed by its count.
    """
    losses: dict[int, float] = {}
    for _, part in parts:
        for place, loss in part.losses.items():
            losses[place] = losses.get(place, 0) + loss
    changed = list(metrics)
    for place, loss in losses.items():
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
        sums = list(map(np.add, sums, wide)) if sums else wide
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
    if len(parts) == 1 and parts[0][1] == 1.0:
        return first
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
