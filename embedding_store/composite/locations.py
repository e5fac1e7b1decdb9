"""Where each kind of a table's tensors lives: settings, and the plan that they make of a model's tables."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from elastable.embedding_store.contract.malformed import UNREADABLE
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, BadSpec, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.support.store_url import shard_urls

STORAGES = ("worker", "memory", "file", "redis")
"""On the worker as an ordinary Keras variable, or in a store: in memory, in files, in Redis."""

KINDS = ("weight", "optimizer_state", "accumulator")
"""The rows, their slots, and the sums of gradients that a version is made of."""

_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class ShardingDomain(Protocol):
    """Which replicas share one copy of a tensor: a `elastable.replicas.groups.group.CommGroup` is one."""

    @property
    def kind(self) -> str:
        """ "all", "consecutive" or "orthogonal"."""

    @property
    def size(self) -> int:
        """Replicas of a domain; of "all" it says nothing."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor lives.

    Attributes:
        storage: One of `STORAGES`.
        replicated_tensor_sharding: Whether the replicas of `et.ReplicaTrainer` share one copy of the tensor, each with
            a part, instead of one each. For dense variables and their optimizer state, not for tables.
        sharding_domain: Which replicas share one copy; None: all of them. Without sharding it says nothing, so that the
            same domain can be in the settings of every kind, as PopART recommends.
    """

    storage: str = "memory"
    replicated_tensor_sharding: bool = False
    sharding_domain: ShardingDomain | None = None

    def __post_init__(self) -> None:
        if self.storage not in STORAGES:
            raise BadSpec(f"tensor location {self.storage!r}: known storages are {', '.join(STORAGES)}")


@dataclass(frozen=True, slots=True)
class TensorLocationSettings:
    """Where the tensors of one kind live.

    Attributes:
        location: Of those that are large enough.
        min_elements_for_off_worker: A tensor of fewer elements stays on the worker, whatever `location` says; 0: none
            does. Tables of any id (no vocabulary size) have no end, and never stay.
        min_elements_for_replicated_tensor_sharding: A tensor of fewer elements is whole on every replica, whatever
            `location` says.
    """

    location: TensorLocation = TensorLocation()
    min_elements_for_off_worker: int = 2
    min_elements_for_replicated_tensor_sharding: int = 8192

    def __post_init__(self) -> None:
        for name in ("min_elements_for_off_worker", "min_elements_for_replicated_tensor_sharding"):
            if getattr(self, name) < 0:
                raise BadSpec(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LocationSettings:
    """Settings for every kind of tensor, and overrides.

    Words and rules are those of PopART's tensor locations: a setting for each kind of tensor, thresholds below which a
    tensor stays where it is computed with, and whole, and overrides by name that know no threshold. Tables are placed
    here, dense variables by `elastable.replicas.training.sharded_variables`.

    Attributes:
        weight: Of the rows.
        optimizer_state: Of their slots. A row and its slots are linked: both must come to lie in one place.
        accumulator: Of the summed gradients of a version; the master's memory is the one place for them.
        overrides: Name of a table or dense variable -> location of its values and of its optimizer state, taken as it
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
        if self.accumulator.location.replicated_tensor_sharding:
            raise BadSpec(
                "accumulator with replicated_tensor_sharding: what an optimizer accumulates is part of its state, and "
                "goes where that goes; say it of optimizer_state"
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
        BadSpec: an override names no table; a table of any id is to stay on the worker; a row and its slots come to lie
            in different places.
        Unsupported: something is to be sharded over replicas.
    """
    refuse_sharding(settings)
    for name in settings.overrides:
        if name not in tables:
            close = get_close_matches(name, tables, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the tables are {', '.join(sorted(tables)) or 'none'}"
            raise BadSpec(f"override {name!r}: there is no such table; {hint}")
    return tuple(line for spec in tables.values() for line in _table_lines(spec, settings))


def refuse_sharding(settings: LocationSettings, mode: str = "sync") -> None:
    """Refuses sharding over replicas, for a job in which a master holds the dense variables.

    Args:
        settings: Of the job.
        mode: "sync" or "async".

    Raises:
        Unsupported: with what is sharded, and why that cannot be.
    """
    kinds = {"weight": settings.weight.location, "optimizer_state": settings.optimizer_state.location}
    asked = [name for name, where in {**kinds, **settings.overrides}.items() if where.replicated_tensor_sharding]
    if not asked:
        return
    if mode == "async":
        raise Unsupported(
            f"{asked[0]}: replicated_tensor_sharding together with async push: an async push is applied when it comes, "
            "by itself, but parts of one variable on several replicas can only be updated in a step that all replicas "
            "take together; use et.ReplicaTrainer, which is synchronous, or leave replicated_tensor_sharding out"
        )
    raise Unsupported(
        f"{asked[0]}: replicated_tensor_sharding shares dense variables over the replicas of et.ReplicaTrainer; the "
        "master of a job holds its tables and dense variables once, and there is nothing to share: leave it out"
    )


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
    on_worker = weight.storage == "worker"
    row_bytes = _VALUE_BYTES[spec.dtype] * spec.dim
    lines = [Placement(spec.name, "weight", spec.dim, size, row_bytes, weight, why)]
    if slot_width:
        state, why_state = _decided(largest, settings.optimizer_state, override)
        lines.append(Placement(spec.name, "optimizer_state", slot_width, size, 4 * slot_width, state, why_state))
        if state != weight:
            raise BadSpec(
                f"table {spec.name!r}: its rows go to {weight.storage} ({why}), their optimizer state to "
                f"{state.storage} ({why_state}); a row and its slots are linked: give both one place"
            )
    if on_worker and size is None:
        raise BadSpec(
            f"table {spec.name!r} holds any id and has no end: it cannot stay on the worker; give the layer an "
            "input_dim, or place the table in memory, file or redis"
        )
    if on_worker and spec.dtype != "float32":
        raise BadSpec(
            f"table {spec.name!r} keeps its rows in {spec.dtype}, which the worker's variables cannot: leave the "
            "layer's table_dtype out, or place the table in memory or file"
        )
    why_sum = "a Keras variable's gradient, summed" if on_worker else "of the ids of one version, summed"
    where = settings.accumulator.location
    lines.append(Placement(spec.name, "accumulator", spec.dim, size, 4 * spec.dim, where, why_sum))
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


# Location settings from a TOML file


_SHARDING = "replicated_tensor_sharding"
_LEAST = ("min_elements_for_off_worker", "min_elements_for_replicated_tensor_sharding")


@dataclass(frozen=True, slots=True)
class Locations:
    """What a location file says.

    Attributes:
        settings: For the tables.
        stores: Storage -> URL of the store that holds what is placed there.
    """

    settings: LocationSettings
    stores: Mapping[str, str] = field(default_factory=dict)


def storage_of_url(url: str) -> str:
    """The storage that a store's URL names: "memory", "file" or "redis"; of shards, where all have the same."""
    _, shards = shard_urls(url)
    if shards:
        kinds = {storage_of_url(shard) for shard in shards}
        return kinds.pop() if len(kinds) == 1 else "memory"
    scheme = url.partition("://")[0].removesuffix("+sentinel")
    return {"file": "file", "redis": "redis", "rediss": "redis"}.get(scheme, "memory")


def read_locations(path: Path, store: str) -> Locations:
    """Reads a file such as

        [stores]                          # memory needs none
        redis = "redis://localhost:6379"

        [weight]
        storage = "redis"
        min_elements_for_off_worker = 4096

        [optimizer_state]                 # left out: as weight

        [overrides]
        users = "memory"

    Args:
        path: The file.
        store: URL of the store that is used where the file names none: it says
            the default storage, and where that is.

    Raises:
        BadInput: the file cannot be read, or names what there is not.
        BadSpec: a location or a number that cannot be.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise BadInput(f"location file {path}: {error}") from error
    _refuse_unknown(path, "", given, ("stores", "weight", "optimizer_state", "accumulator", "overrides"))
    default = storage_of_url(store)
    weight = _settings(path, given, "weight", TensorLocationSettings(TensorLocation(default)))
    state = _settings(path, given, "optimizer_state", weight)
    accumulator = _settings(path, given, "accumulator", TensorLocationSettings())
    overrides = {str(name): TensorLocation(str(where)) for name, where in _table(path, given, "overrides").items()}
    stores = {"memory": "memory", default: store}
    for storage, url in _table(path, given, "stores").items():
        if storage not in STORAGES[1:] or not isinstance(url, str):
            raise BadInput(
                f"location file {path}: [stores] {storage} = {url!r}; give URLs of {', '.join(STORAGES[1:])}"
            )
        stores[storage] = url
    return Locations(LocationSettings(weight, state, accumulator, overrides), stores)


def _settings(
    path: Path, document: Mapping[str, object], kind: str, default: TensorLocationSettings
) -> TensorLocationSettings:
    given = _table(path, document, kind)
    _refuse_unknown(path, f"[{kind}] ", given, ("storage", _SHARDING, *_LEAST))
    least = {name: given.get(name, getattr(default, name)) for name in _LEAST}
    for name, number in least.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise BadInput(f"location file {path}: [{kind}] {name} must be an integer, got {number!r}")
    sharded = given.get(_SHARDING, default.location.replicated_tensor_sharding)
    if not isinstance(sharded, bool):
        raise BadInput(f"location file {path}: [{kind}] {_SHARDING} must be true or false, got {sharded!r}")
    storage = str(given.get("storage", default.location.storage))
    return TensorLocationSettings(TensorLocation(storage, replicated_tensor_sharding=sharded), **least)


def _table(path: Path, given: Mapping[str, object], name: str) -> Mapping[str, Any]:
    found = given.get(name, {})
    if not isinstance(found, dict):
        raise BadInput(f"location file {path}: {name} must be a table ([{name}]), got {found!r}")
    return found


def _refuse_unknown(path: Path, where: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise BadInput(f"location file {path}: {where}{unknown[0]!r} is unknown; known are {', '.join(known)}")
