"""The dense part of a model in slices, one for each store server: cut, summed, kept and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadGradient, FutureVersion, NotFinite, StaleVersion
from elastable.embedding_store.shards.row_pushes import DenseGradients, DenseLayout, DenseSlice, SumTerm

__all__ = [
    "DenseValues",
    "cut",
    "joined",
    "layout_of_servers",
    "require_dense",
    "sum_dense",
    "weighted_sum",
]


_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class _Range:
    place: int
    start: int
    stop: int


def layout_of_servers(layout: DenseLayout, servers: int) -> list[dict[int, DenseSlice]]:
    """What each of so many servers holds: of all elements, one variable after the other, an equal run."""
    return [
        {each.place: DenseSlice(layout[each.place].dtype, each.stop - each.start, layout[each.place].name)
         for each in _ranges(layout, servers, number)}
        for number in range(servers)
    ]  # fmt: skip


def cut(values: Mapping[int, Array], layout: DenseLayout, servers: int) -> list[dict[int, Array]]:
    """The slices of each server.

    Args:
        values: Place of a variable -> its values, of any shape; some may be missing.
        layout: Of all variables.
        servers: How many there are.

    Raises:
        BadGradient: values that are not as the layout says.
    """
    for place, array in values.items():
        if place not in layout or array.size != layout[place].size or array.dtype != layout[place].dtype:
            raise BadGradient(f"dense values of variable {place}: {_told(array)}; {_wanted(layout, place)}")
    flat = {place: np.ascontiguousarray(array).reshape(-1) for place, array in values.items()}
    return [
        {
            each.place: flat[each.place][each.start : each.stop]
            for each in _ranges(layout, servers, number)
            if each.place in flat
        }
        for number in range(servers)
    ]


def joined(slices: Sequence[Mapping[int, Array]], layout: DenseLayout) -> dict[int, Array]:
    """The inverse of `cut`, where nothing is missing: place -> values of one dimension."""
    values: dict[int, Array] = {}
    for number, of_server in enumerate(slices):
        for each in _ranges(layout, len(slices), number):
            whole = layout[each.place]
            if each.stop - each.start == whole.size:
                values[each.place] = of_server[each.place]
            else:
                values.setdefault(each.place, np.empty(whole.size, whole.dtype))
                values[each.place][each.start : each.stop] = of_server[each.place]
    return {place: values.get(place, np.empty(0, of.dtype)) for place, of in layout.items()}


def require_dense(gradients: Sequence[DenseGradients], parts: int, layout: DenseLayout, finite: bool) -> None:
    """Refuses dense gradients of a push that are not those of the job.

    Args:
        gradients: Of each part; none: the push has none.
        parts: Of the push.
        layout: What the server holds; nothing: the job's dense gradients go to its master.
        finite: Whether NaN and Inf are refused, too.

    Raises:
        BadGradient: there are some where there should be none, or none; another variable, size or dtype.
        NotFinite: names the variable.
    """
    if not layout and not any(gradients):
        return
    if len(gradients) != parts or gradients[0].keys() != layout.keys():
        found = sorted(gradients[0]) if gradients else []
        raise BadGradient(
            f"a push of {parts} parts has dense gradients for {len(gradients)}, the first of which are of the "
            f"variables {found}; the store server holds slices of {sorted(layout)}"
        )
    for part in gradients:
        for place, array in part.items():
            if place not in layout or array.shape != (layout[place].size,) or array.dtype != layout[place].dtype:
                raise BadGradient(f"dense gradient of variable {place}: {_told(array)}; {_wanted(layout, place)}")
            if finite and not np.isfinite(array).all():
                raise NotFinite(f"gradient of variable {layout[place].name!r} holds NaN or Inf")


def sum_dense(terms: Sequence[SumTerm], pushes: Mapping[int, Sequence[DenseGradients]]) -> dict[int, Array]:
    """The summed slices of a version, by place.

    Args:
        terms: In the order in which they are summed.
        pushes: By micro-batch, the gradients of each part.
    """
    every = [(pushes[term.micro_batch][term.part], term.share) for term in terms]
    places = sorted({place for part, _ in every for place in part})
    with np.errstate(invalid="ignore", over="ignore"):  # gradients of a job with a loss scale may overflow
        return {
            place: weighted_sum([(part[place], share) for part, share in every if place in part]) for place in places
        }


def weighted_sum(parts: Sequence[tuple[Array, float]]) -> Array:
    """The sum of arrays times their shares, as a left fold; of their dtype, in float32 at least until it is made."""
    first = parts[0][0]
    wide = np.result_type(first.dtype, np.float32)
    flat = [(np.ascontiguousarray(part).reshape(-1), wide.type(share)) for part, share in parts]
    total: Array = np.empty(first.size, first.dtype)
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


class DenseValues:
    """The slices of dense variables of one version, for workers to read. Safe to use from many threads."""

    def __init__(self) -> None:
        self._kept: tuple[int, Mapping[int, Array]] = (-1, {})

    @property
    def bytes(self) -> int:
        """Of what is kept."""
        return sum(array.nbytes for array in self._kept[1].values())

    def keep(self, version: int, values: Mapping[int, Array]) -> None:
        """In place of those before."""
        self._kept = version, values

    def of(self, version: int) -> Mapping[int, Array]:
        """Those of a version, if that is the one that is kept. Raises `StaleVersion` and `FutureVersion`."""
        kept, values = self._kept
        if version != kept:
            kind = StaleVersion if version < kept else FutureVersion
            raise kind(f"dense variables of version {version}; here are those of {kept if kept >= 0 else 'none'}")
        return values

    def forget(self) -> None:
        """Keeps nothing."""
        self._kept = -1, {}


def _ranges(layout: DenseLayout, servers: int, number: int) -> Iterator[_Range]:
    """What one server holds of each variable, where that is anything."""
    total = sum(each.size for each in layout.values())
    begin, end = total * number // servers, total * (number + 1) // servers
    before = 0
    for place in sorted(layout):
        size = layout[place].size
        start, stop = max(begin - before, 0), min(end - before, size)
        if start < stop:
            yield _Range(place, start, stop)
        before += size


def _told(array: Array) -> str:
    return f"got {array.dtype} {list(array.shape)}"


def _wanted(layout: DenseLayout, place: int) -> str:
    if place not in layout:
        return f"known are {sorted(layout)}"
    return f"want {layout[place].size} of {layout[place].dtype}"
