"""The collectives of a step: many tensors in few messages, each over its sharding domain."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.replica_grouping import ReplicaGrouping
from elastable.replicas.training.variables.split import VariableSplit

_MOST_BYTES = 64 << 20
"""Of tensors that are sent together: bounds the memory of packed copies."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor is laid out over replicas.

    Attributes:
        elements: Number of elements; any for a tensor without a domain.
        domain: The replicas that share one copy; None: every replica has all of it.
    """

    elements: int = 0
    domain: ReplicaGrouping | None = None

    @property
    def split(self) -> VariableSplit:
        """Into the parts of its domain; only with one."""
        assert self.domain is not None
        return VariableSplit(self.elements, self.domain.group_size)


class Exchange:
    """Reduces and gathers tensors over a group; every member calls the same methods with the same layouts."""

    def __init__(self, group: ReplicaGroup, domains: Iterable[ReplicaGrouping]) -> None:
        """Makes the groups of the domains; every member calls it."""
        self.group = group
        self._domains: dict[ReplicaGrouping, ReplicaGroup] = {}
        self._across: dict[ReplicaGrouping, ReplicaGroup] = {}
        for domain in dict.fromkeys(domains):
            self._domains[domain] = group.subgroup(domain)
            if domain.groups > 1:
                self._across[domain] = group.subgroup(domain.transposed())

    def part(self, domain: ReplicaGrouping) -> int:
        """The index of this replica's part of tensors in this domain."""
        return self._domains[domain].rank

    def reduce(self, arrays: Sequence[Array], layouts: Sequence[Layout]) -> list[Array]:
        """Everyone's arrays, summed in rank order: this replica's buffer where there is a split, else the whole.

        Arrays are reduce-scattered within a domain, then all-reduced over the replicas that hold the same part. So a
        sum over a domain of all replicas has the bits that it has without a split.

        Args:
            arrays: Of number dtypes, any shapes.
        """
        found: list[Array] = list(arrays)
        for places in _together(arrays, layouts):
            layout = layouts[places[0]]
            if layout.domain is None:
                total = self.group.all_reduce(_joined(arrays, places))
                for place, first, length in _runs(places, [arrays[place].size for place in places]):
                    found[place] = total[first : first + length].reshape(arrays[place].shape)
                continue
            lengths = [layouts[place].split.length for place in places]
            rows = np.empty((layout.domain.group_size, sum(lengths)), arrays[places[0]].dtype)
            for place, first, length in _runs(places, lengths):
                layouts[place].split.put(arrays[place], rows[:, first : first + length])
            mine = self._domains[layout.domain].reduce_scatter(rows)
            del rows
            if layout.domain in self._across:
                mine = self._across[layout.domain].all_reduce(mine)
            for place, first, length in _runs(places, lengths):
                found[place] = mine[first : first + length]
        return found

    def gather(self, buffers: Sequence[Array], layouts: Sequence[Layout]) -> list[Array]:
        """The whole tensors, flat `[elements]`, of everyone's buffers.

        Args:
            buffers: `[length]` of its split each.
            layouts: One for each, all with a split.
        """
        found: list[Array] = list(buffers)
        for places in _together(buffers, layouts):
            domain = layouts[places[0]].domain
            assert domain is not None  # of those with a split
            rows = self._domains[domain].all_gather(_joined(buffers, places))
            for place, first, length in _runs(places, [buffers[place].size for place in places]):
                found[place] = layouts[place].split.join(rows[:, first : first + length])
        return found


def _together(arrays: Sequence[Array], layouts: Sequence[Layout]) -> Iterator[list[int]]:
    """Positions of arrays that are sent together: of one domain and dtype, in bounded bytes."""
    kinds: dict[tuple[ReplicaGrouping | None, str], list[int]] = {}
    for place, (array, layout) in enumerate(zip(arrays, layouts, strict=True)):
        kinds.setdefault((layout.domain, array.dtype.name), []).append(place)
    for places in kinds.values():
        held, size = list[int](), 0
        for place in places:
            if held and size + arrays[place].nbytes > _MOST_BYTES:
                yield held
                held, size = [], 0
            held.append(place)
            size += arrays[place].nbytes
        yield held


def _joined(arrays: Sequence[Array], places: Sequence[int]) -> Array:
    """The arrays, flat, one after another."""
    if len(places) == 1:
        return arrays[places[0]].reshape(-1)
    return np.concatenate([arrays[place].reshape(-1) for place in places])


def _runs(places: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first, length) of arrays that follow each other."""
    first = 0
    for place, length in zip(places, lengths, strict=True):
        yield place, first, length
        first += length
