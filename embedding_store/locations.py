"""Where each kind of a table's tensors lives: settings, and the plan that they make of a model's tables.

The words and the rules are those of PopART's tensor locations
(`TensorLocation`, `TensorLocationSettings`, `minElementsForOffChip`): a
setting for each kind of tensor, a threshold below which a tensor stays where
it is computed with, and overrides by name that know no threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from embedding_store.errors import BadSpec
from embedding_store.row_optimizer import row_optimizer
from embedding_store.spec import TableSpec

__all__ = [
    "KINDS",
    "STORAGES",
    "LocationSettings",
    "Placement",
    "TensorLocation",
    "TensorLocationSettings",
    "plan_tables",
    "storage_of_tables",
]

STORAGES = ("worker", "memory", "file", "redis")
"""On the worker as an ordinary Keras variable, or in a store: in memory, in files, in Redis."""

KINDS = ("weight", "optimizer_state", "accumulator")
"""The rows, their slots, and the sums of gradients that a version is made of."""

_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor lives.

    Attributes:
        storage: One of `STORAGES`.
    """

    storage: str = "memory"

    def __post_init__(self) -> None:
        if self.storage not in STORAGES:
            raise BadSpec(f"tensor location {self.storage!r}: known storages are {', '.join(STORAGES)}")


@dataclass(frozen=True, slots=True)
class TensorLocationSettings:
    """Where the tensors of one kind live.

    Attributes:
        location: Of those that are large enough.
        min_elements_for_off_worker: A tensor of fewer elements stays on the
            worker, whatever `location` says; 0: none does. Tables of any id
            (no vocabulary size) have no end, and never stay.
    """

    location: TensorLocation = TensorLocation()
    min_elements_for_off_worker: int = 2

    def __post_init__(self) -> None:
        if self.min_elements_for_off_worker < 0:
            raise BadSpec(f"min_elements_for_off_worker must not be negative, got {self.min_elements_for_off_worker}")


@dataclass(frozen=True, slots=True)
class LocationSettings:
    """Settings for every kind of tensor, and overrides.

    Attributes:
        weight: Of the rows.
        optimizer_state: Of their slots. A row and its slots are linked: both
            must come to lie in one place.
        accumulator: Of the summed gradients of a version; the master's memory
            is the one place for them.
        overrides: Table name -> location of its rows and slots, taken as it
            is, without thresholds.
    """

    weight: TensorLocationSettings = TensorLocationSettings()
    optimizer_state: TensorLocationSettings = TensorLocationSettings()
    accumulator: TensorLocationSettings = TensorLocationSettings()
    overrides: Mapping[str, TensorLocation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.accumulator.location.storage != "memory":
            raise BadSpec(
                f"accumulator on {self.accumulator.location.storage!r}: gradients are summed in the master's memory; "
                "leave it at 'memory'"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """One line of a plan.

    Attributes:
        table: Its name.
        kind: One of `KINDS`.
        row: Elements of one row of the tensor.
        rows: Rows of the whole tensor; None: as many as ids are met.
        row_bytes: Bytes that one row takes.
        location: Where it lives.
        reason: Why there.
    """

    table: str
    kind: str
    row: int
    rows: int | None
    row_bytes: int
    location: TensorLocation
    reason: str

    @property
    def elements(self) -> int | None:
        """Of the whole tensor; None: as many as ids are met."""
        return None if self.rows is None else self.rows * self.row

    @property
    def bytes(self) -> int | None:
        """Of the whole tensor; None: as many as ids are met."""
        return None if self.rows is None else self.rows * self.row_bytes


def plan_tables(tables: Mapping[str, TableSpec], settings: LocationSettings) -> tuple[Placement, ...]:
    """What goes where, and why; the placements of one table follow each other.

    Args:
        tables: By name.
        settings: For all of them.

    Raises:
        BadSpec: an override names no table; a table of any id is to stay on
            the worker; a row and its slots come to lie in different places.
    """
    for name in settings.overrides:
        if name not in tables:
            close = get_close_matches(name, tables, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the tables are {', '.join(sorted(tables)) or 'none'}"
            raise BadSpec(f"override {name!r}: there is no such table; {hint}")
    return tuple(line for spec in tables.values() for line in _table_lines(spec, settings))


def storage_of_tables(plan: Iterable[Placement]) -> dict[str, str]:
    """Table name -> storage of its rows."""
    return {line.table: line.location.storage for line in plan if line.kind == "weight"}


def _table_lines(spec: TableSpec, settings: LocationSettings) -> tuple[Placement, ...]:
    slot_width = row_optimizer(spec.optimizer).slot_width(spec.dim)
    override = settings.overrides.get(spec.name)
    # Linked tensors are measured together: a small accumulator goes where its large table goes.
    size = spec.vocabulary_size
    # The worker's variables are float32: a table of another dtype never stays for its size.
    largest = None if size is None or spec.dtype != "float32" else size * max(spec.dim, slot_width)
    weight, why = _decided(largest, settings.weight, override)
    lines = [_line(spec, "weight", spec.dim, _VALUE_BYTES[spec.dtype], weight, why)]
    if slot_width:
        state, why_state = _decided(largest, settings.optimizer_state, override)
        lines.append(_line(spec, "optimizer_state", slot_width, 4, state, why_state))
        if state != weight:
            raise BadSpec(
                f"table {spec.name!r}: its rows go to {weight.storage} ({why}), their optimizer state to "
                f"{state.storage} ({why_state}); a row and its slots are linked: give both one place"
            )
    if weight.storage == "worker" and spec.vocabulary_size is None:
        raise BadSpec(
            f"table {spec.name!r} holds any id and has no end: it cannot stay on the worker; give the layer an "
            "input_dim, or place the table in memory, file or redis"
        )
    if weight.storage == "worker" and spec.dtype != "float32":
        raise BadSpec(
            f"table {spec.name!r} keeps its rows in {spec.dtype}, which the worker's variables cannot: leave the "
            "layer's table_dtype out, or place the table in memory or file"
        )
    on_worker = weight.storage == "worker"
    why_sum = "a Keras variable's gradient, summed" if on_worker else "of the ids of one version, summed"
    lines.append(_line(spec, "accumulator", spec.dim, 4, settings.accumulator.location, why_sum))
    return tuple(lines)


def _decided(
    elements: int | None, settings: TensorLocationSettings, override: TensorLocation | None
) -> tuple[TensorLocation, str]:
    if override is not None:
        return override, "override by name"
    if elements is not None and elements < settings.min_elements_for_off_worker:
        return (
            TensorLocation("worker"),
            f"{elements:,} elements, fewer than min_elements_for_off_worker={settings.min_elements_for_off_worker:,}",
        )
    return settings.location, "setting" if elements is None else f"setting, {elements:,} elements"


def _line(spec: TableSpec, kind: str, row: int, value_bytes: int, location: TensorLocation, reason: str) -> Placement:
    return Placement(spec.name, kind, row, spec.vocabulary_size, row * value_bytes, location, reason)
