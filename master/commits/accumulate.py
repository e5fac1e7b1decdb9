"""Many pushes -> one: sums in micro-batch order, so that the order of arrival changes no bit. Rows: how to sum them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.shards.server_contract import RowSums, Slices, SumTerm
from elastable.embedding_store.shards.version_sums import each_row_once, table_updates
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


class WeightedPushes:
    """The pushes of a version, and what every part of each weighs in its gradient.

    Every part of a push weighs as its divisor says (`elastable.master.api.DivisorKind`), in dense variables and tables
    alike, so that the sum is the gradient of one batch of all records. Sums are left folds in the order given: first
    of every push the first part, in push order, then the second...

    Args:
        pushes: In micro-batch order; checked (`elastable.master.push_check`), all with the same kinds of divisors.
        average: What a push without a divisor means: "sum", by nothing; "batches", by the number of pushes; else, by
            records.

    Raises:
        BadInput: pushes without records.
    """

    def __init__(self, pushes: Sequence[Push], average: str) -> None:
        self._pushes, counts, every = pushes, [], []
        meant = _MEANT.get(average, Divisor(DivisorKind.RECORDS))
        for push in pushes:
            counts.append(push.records)
            first = GradientPart(push.divisor or meant, dict(enumerate(push.dense)), push.slices, push.losses)
            every.append((first, *push.parts))
        if pushes and (min(counts) < 0 or not any(counts)):
            raise BadInput(f"pushes of {counts} records: a push must have at least one")
        self._counts = counts
        # A part of all pushes, and its shares.
        self._parts: list[tuple[tuple[GradientPart, ...], list[float]]] = []
        for alike in zip(*every, strict=True):
            self._parts.append((alike, _shares(alike, counts)))

    def accumulated(self) -> Accumulated:
        """One gradient out of them, but that of the rows.

        A state is the mean over records in any case; integer and boolean states are the last push's.
        """
        if not self._pushes:
            return Accumulated()
        records, terms = sum(self._counts), list[list[tuple[Tensor, float]]]()
        for _ in self._pushes[0].dense:
            terms.append([])
        for alike, shares in self._parts:
            for part, share in zip(alike, shares, strict=True):
                for place, values in part.dense.items():
                    terms[place].append((values, share))
        states, of_records = [], _divided(self._counts)
        for state in zip(*map(attrgetter("states"), self._pushes), strict=True):
            states.append(_weighted_mean(state, of_records))
        return Accumulated(records, tuple(map(_weighted_sum, terms)), states=tuple(states), metrics=self._metrics())

    def row_updates(self, frozen: Collection[str]) -> dict[str, TableUpdate]:
        """The rows' part of it: the summed gradient of every table that has one, but for frozen ones."""
        slices, weights = list[Mapping[str, Slices]](), list[float]()
        for alike, shares in self._parts:
            of_part = list(map(attrgetter("slices"), alike))
            slices += each_row_once(of_part) if alike[0].divisor.kind is DivisorKind.ROWS else of_part
            weights += shares
        return table_updates(slices, weights, frozen)

    def row_sums(self, version: int, frozen: Sequence[str]) -> RowSums:
        """How store servers, which have the rows' part of the pushes, come to the same.

        Args:
            frozen: Tables that take no step.
        """
        if not self._pushes:
            return RowSums(version, frozen=tuple(frozen))
        terms, once = [], []
        for part, (alike, shares) in enumerate(self._parts):
            for push, share in zip(self._pushes, shares, strict=True):
                number = push.id.sequence if isinstance(push.id, AsyncPushId) else push.id.micro_batch
                terms.append(SumTerm(number, part, share))
            if alike[0].divisor.kind is DivisorKind.ROWS:
                once.append(part)
        first = self._pushes[0].id  # asynchronous ones are of one sender
        sender = first.incarnation if isinstance(first, AsyncPushId) else ""
        return RowSums(version, tuple(terms), tuple(once), tuple(frozen), sender)

    def _metrics(self) -> tuple[Tensor, ...]:
        """Summed metric states, with totals of losses as one batch of all records would have counted them.

        The total of a mean is followed by its count.
        """
        first, changed = self._pushes[0], list(add_metrics((), list(map(attrgetter("metrics"), self._pushes))))
        losses: dict[int, float] = {}
        terms: list[tuple[Mapping[int, float], float]]
        for alike, shares in self._parts:
            if alike[0].divisor.kind is DivisorKind.ROWS:
                terms = [(dict.fromkeys(alike[0].losses, _penalty(alike)), 1.0)]
            elif any(shares):
                terms = list(zip(map(attrgetter("losses"), alike), shares, strict=True))
            else:  # a mean of no values may be NaN; it counts where all of them are of none
                terms = [(alike[0].losses, 1.0)]
            for of_part, share in terms:
                for place, loss in of_part.items() if share else ():
                    losses[place] = losses.get(place, 0) + share * loss
        for place, loss in losses.items():
            if place in first.once:
                changed[place + 1] = first.metrics[place + 1].astype(np.float64)
            changed[place] = np.float64(loss) * changed[place + 1]
        return tuple(changed)


_MEANT = {"sum": Divisor(DivisorKind.NOTHING), "batches": Divisor(DivisorKind.AMOUNT, 1.0)}


def _penalty(parts: Sequence[GradientPart]) -> float:
    """What the parts' rows add to a loss together: each row of the version once."""
    total = 0.0
    for table in dict.fromkeys(table for part in parts for table in part.penalties):
        given = [part.penalties[table] for part in parts if table in part.penalties]
        _, first = np.unique(np.concatenate([rows.indices for rows in given]), return_index=True)
        total += float(np.concatenate([rows.values for rows in given])[first].sum(dtype=np.float64))
    return total


def _shares(parts: Sequence[GradientPart], records: Sequence[int]) -> list[float]:
    """What the parts, one of each push and divided alike, weigh."""
    kind = parts[0].divisor.kind
    if kind in (DivisorKind.NOTHING, DivisorKind.ROWS):
        return [1.0] * len(parts)
    return _divided([part.divisor.amount for part in parts] if kind is DivisorKind.AMOUNT else records)


def _divided(amounts: Sequence[float]) -> list[float]:
    """Each amount divided by all of them. As Keras: what is divided by no weight at all is zero."""
    total, found = float(sum(amounts)), []
    for amount in amounts:
        found.append(amount / total if total else 0.0)
    return found


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
