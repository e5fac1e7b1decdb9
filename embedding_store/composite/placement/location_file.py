"""Location settings from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastable.embedding_store.composite.placement.locations import (
    STORAGES,
    LocationSettings,
    TensorLocation,
    TensorLocationSettings,
)
from elastable.embedding_store.contract.malformed import UNREADABLE
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.store_url import shard_urls

__all__ = ["Locations", "read_locations", "storage_of_url"]

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
    """The storage that a store's URL stands for: "memory", "file" or "redis"; of shards, where all have the same."""
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
    weight = _settings(path, "weight", given.get("weight", {}), TensorLocationSettings(TensorLocation(default)))
    state = _settings(path, "optimizer_state", given.get("optimizer_state", {}), weight)
    accumulator = _settings(path, "accumulator", given.get("accumulator", {}), TensorLocationSettings())
    overrides = {str(name): TensorLocation(str(where)) for name, where in _table(path, given, "overrides").items()}
    stores = {"memory": "memory", default: store}
    for storage, url in _table(path, given, "stores").items():
        if storage not in STORAGES[1:] or not isinstance(url, str):
            raise BadInput(
                f"location file {path}: [stores] {storage} = {url!r}; give URLs of {', '.join(STORAGES[1:])}"
            )
        stores[storage] = url
    return Locations(LocationSettings(weight, state, accumulator, overrides), stores)


def _settings(path: Path, kind: str, given: object, default: TensorLocationSettings) -> TensorLocationSettings:
    if not isinstance(given, dict):
        raise BadInput(f"location file {path}: {kind} must be a table ([{kind}]), got {given!r}")
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


def _table(path: Path, given: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = given.get(name, {})
    if not isinstance(found, dict):
        raise BadInput(f"location file {path}: {name} must be a table ([{name}]), got {found!r}")
    return found


def _refuse_unknown(path: Path, where: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise BadInput(f"location file {path}: {where}{unknown[0]!r} is unknown; known are {', '.join(known)}")
