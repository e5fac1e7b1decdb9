"""Dense variables over replicas: which are sharded and why, their balanced split, and the collectives of a step."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.composite.locations import LocationSettings, TensorLocation, TensorLocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, BadSpec
from elastable.replicas.groups.group import CommGroup, ReplicaGroup, ReplicaGrouping

# The balanced split of a tensor's elements into equal buffers: arithmetic only, no communication


Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class VariableSplit:
    """How the elements of a tensor, in C order, are divided.

    Sizes differ by at most 1 and longer parts come first, like those of
    `numpy.array_split`. Every part is stored in a buffer of the longest part's length, padded
    at its end (PopART's replicated tensor sharding; ZeRO, Rajbhandari et al. 2020).

    Attributes:
        elements: Elements of the tensor, at least 1.
        parts: Number of parts, at least 1.

    Raises:
        BadInput: a number below 1.
    """

    elements: int
    parts: int

    def __post_init__(self) -> None:
        for name in ("elements", "parts"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} of a split must be at least 1, got {getattr(self, name)}")

    @property
    def length(self) -> int:
        """Elements of a buffer: `ceil(elements / parts)`."""
        return -(-self.elements // self.parts)

    def bounds(self, part: int) -> tuple[int, int]:
        """(first, last + 1) element of a part. Raises BadInput if there is no such part."""
        if not 0 <= part < self.parts:
            raise BadInput(f"there is no part {part}; the parts are 0 to {self.parts - 1}")
        short, longer = divmod(self.elements, self.parts)
        first = part * short + min(part, longer)
        return first, first + short + (part < longer)

    def take(self, part: int, tensor: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The buffer `[length]` of one part of a tensor of any shape: a copy, padded with zeros."""
        first, last = self.bounds(part)
        buffer = np.zeros(self.length, tensor.dtype)
        buffer[: last - first] = tensor.reshape(-1)[first:last]
        return buffer

    def put(self, tensor: npt.NDArray[Number], rows: npt.NDArray[Number]) -> None:
        """Writes the buffers of all parts of a tensor, padding included, into `rows` `[parts, >= length]`."""
        flat = tensor.reshape(-1)
        short, longer = divmod(self.elements, self.parts)
        end = longer * self.length
        rows[:longer, : self.length] = flat[:end].reshape(longer, self.length)
        rows[longer:, :short] = flat[end:].reshape(self.parts - longer, short)
        rows[longer:, short : self.length] = 0

    def join(self, rows: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The elements `[elements]` in order, without padding, from `rows` `[parts, length]`; a copy."""
        short, longer = divmod(self.elements, self.parts)
        flat = np.empty(self.elements, rows.dtype)
        end = longer * self.length
        flat[:end] = rows[:longer].reshape(-1)
        flat[end:].reshape(self.parts - longer, short)[:] = rows[longer:, :short]
        return flat


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


# Which dense variables, and which of their optimizer states, are sharded over replicas, and why. The rules are those of
# PopART's replicated tensor sharding (`TensorLocation.replicatedTensorSharding`,
# `minElementsForReplicatedTensorSharding`, sharding domains, and overrides by name that know no threshold).


_STATE = "/optimizer_state"
_HERE = ("memory", "worker")


@dataclass(frozen=True, slots=True)
class DenseVariable:
    """A trainable variable, as planning sees it.

    Attributes:
        name: Path in the model.
        shape: Shape, also of each slot.
        value_bytes: Bytes of one element.
        slots: Values that the optimizer keeps per element.
        constrained: Whether a constraint is applied after every update.
    """

    name: str
    shape: tuple[int, ...]
    value_bytes: int = 4
    slots: int = 0
    constrained: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class VariablePlacement:
    """One line of a plan.

    Attributes:
        variable: Path in the model.
        kind: "weight" or "optimizer_state" (all slots).
        elements, bytes: Size of the whole.
        here: Bytes that one replica holds, padding included.
        domain: The replicas that share one copy; None: every replica has one.
    """

    variable: str
    kind: str
    elements: int
    bytes: int
    here: int
    domain: ReplicaGrouping | None
    reason: str


def plan_variables(
    variables: Sequence[DenseVariable], settings: LocationSettings, replicas: int
) -> tuple[VariablePlacement, ...]:
    """What is sharded and why: for every variable a line for its weight and one for its state, if any.

    Args:
        variables: The model's variables, in order.
        settings: Settings for all of them. An override names a variable by its path or a suffix of it and applies to
            weight and state; with "/optimizer_state" appended, to the state alone.

    Raises:
        BadSpec: a variable is given twice; an override matches no variable, several, or one that another override
            names; weight and state have different domains; a storage that dense variables cannot have.
        BadInput: a sharding domain does not divide the replicas.
    """
    names = [variable.name for variable in variables]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise BadSpec(f"variable {twice!r} is sharded twice; give each variable once")
    overrides = _overrides(names, settings.overrides)
    return tuple(line for variable in variables for line in _lines(variable, settings, overrides, replicas))


def update_domains(plan: Iterable[VariablePlacement]) -> dict[str, ReplicaGrouping | None]:
    """By variable: the replicas that each update a part of it; None: every replica updates all of it.

    The state's domain decides, because an element's update needs its state; without state, the weight's.
    """
    domains: dict[str, ReplicaGrouping | None] = {}
    for line in plan:
        if line.kind == "optimizer_state" or line.variable not in domains:
            domains[line.variable] = line.domain
    return domains


def sharding_of(
    kind: str, elements: int, settings: TensorLocationSettings, override: TensorLocation | None, replicas: int
) -> tuple[ReplicaGrouping | None, str]:
    """The replicas that share one copy of a tensor (None: each has its own), and why.

    Args:
        kind: "weight", "optimizer_state" or "activation".
        settings: Settings of this kind of tensor.
        override: Applied without thresholds.
    """
    location = settings.location if override is None else override
    why = f"setting, {elements:,} elements" if override is None else "override by name"
    least = settings.min_elements_for_replicated_tensor_sharding
    if location.storage not in _HERE:
        raise BadSpec(f"{kind} in {location.storage!r}: dense variables live in the memory of the replicas; say memory")
    if not location.replicated_tensor_sharding:
        return None, why
    if kind == "activation":
        return None, "an activation belongs to the replica that computed it"
    if replicas == 1:
        return None, "one replica"
    domain = location.sharding_domain or CommGroup()
    grouping = CommGroup(domain.kind, domain.size).grouping(replicas)
    if override is None and elements < least:
        return None, f"{elements:,} elements, fewer than min_elements_for_replicated_tensor_sharding={least:,}"
    return (None, "a sharding domain of one replica") if grouping.group_size == 1 else (grouping, why)


def _lines(
    variable: DenseVariable, settings: LocationSettings, overrides: Mapping[str, TensorLocation], replicas: int
) -> list[VariablePlacement]:
    override = overrides.get(variable.name)
    of_state = overrides.get(variable.name + _STATE, override)
    weight, why = sharding_of("weight", variable.elements, settings.weight, override, replicas)
    state, why_state = sharding_of("optimizer_state", variable.elements, settings.optimizer_state, of_state, replicas)
    if weight is not None and variable.constrained:
        if override is not None:
            raise BadSpec(
                f"variable {variable.name!r} has a constraint, which needs all of it after every update: its weight "
                f"cannot be sharded; override {variable.name + _STATE!r} to shard its optimizer state alone"
            )
        weight, why = None, "its constraint needs all of it after every update"
    if weight is not None and variable.slots and state is not None and state != weight:
        raise BadSpec(
            f"weight {variable.name!r} is sharded over {_domain_text(weight)} ({why}), its optimizer state "
            f"{variable.name + _STATE!r} over {_domain_text(state)} ({why_state}); a weight and its optimizer "
            "state are linked: give both one sharding domain, or shard one of them alone"
        )
    lines = [_line(variable, "weight", 1, weight, why)]
    if variable.slots:
        lines.append(_line(variable, "optimizer_state", variable.slots, state, why_state))
    return lines


def _line(
    variable: DenseVariable, kind: str, copies: int, domain: ReplicaGrouping | None, why: str
) -> VariablePlacement:
    held = variable.elements if domain is None else VariableSplit(variable.elements, domain.group_size).length
    size = copies * variable.value_bytes
    elements = copies * variable.elements
    return VariablePlacement(variable.name, kind, elements, variable.elements * size, held * size, domain, why)


def _domain_text(domain: ReplicaGrouping) -> str:
    stride = "" if domain.stride == 1 else f" at stride {domain.stride}"
    return f"each {domain.group_size} of {domain.replicas} replicas{stride}"


def _overrides(names: Sequence[str], given: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """The overrides by full paths, `_STATE` appended to those of state alone."""
    found: dict[str, TensorLocation] = {}
    by: dict[str, str] = {}
    for key, location in given.items():
        asked = key.removesuffix(_STATE)
        fits = [name for name in names if name == asked] or [name for name in names if name.endswith(f"/{asked}")]
        if not fits:
            close = get_close_matches(asked, names, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}?" if close else f"the variables are {', '.join(names) or 'none'}"
            raise BadSpec(f"override {key!r}: there is no such variable; {hint}")
        if len(fits) > 1:
            raise BadSpec(f"override {key!r} fits {', '.join(fits)}: name one of them in full")
        whole = fits[0] + key[len(asked) :]
        if whole in found:
            raise BadSpec(f"variable {whole!r} is sharded twice: override {by[whole]!r} names it, and {key!r}")
        found[whole], by[whole] = location, key
    return found
