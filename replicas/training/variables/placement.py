"""Which dense variables, and which of their optimizer states, are sharded over replicas, and why.

The rules are those of PopART's replicated tensor sharding (`TensorLocation.replicatedTensorSharding`,
`minElementsForReplicatedTensorSharding`, sharding domains, and overrides by name that know no threshold).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from elastable.embedding_store.composite.locations import LocationSettings, TensorLocation, TensorLocationSettings
from elastable.embedding_store.errors import BadSpec
from elastable.replicas.groups.replica_grouping import CommGroup, ReplicaGrouping
from elastable.replicas.training.variables.split import VariableSplit

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
