"""Taking a commit back: partitions return to what they were, from the before-images that it left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StaleVersion, StoreBroken, StoreFailed
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tiers.redis.before_images import BeforeImage, Moment
from elastable.embedding_store.tiers.redis.catalog import Catalog, TableKeys
from elastable.embedding_store.tiers.redis.deletion import removal
from elastable.embedding_store.tiers.redis.more_commands import MoreCommands
from elastable.embedding_store.tiers.redis.past_images import fetch_listed
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.resp_codec import COMMAND
from elastable.embedding_store.tiers.redis.row_update import block_with_slots
from elastable.embedding_store.tiers.redis.schema_1 import STAMP_FIELD
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transfer import write_block

__all__ = ["PartitionStamps", "read_stamps", "require_way_back", "take_back"]

_PARTITIONS_AT_ONCE = 64  # whose before-images are in memory together

PartitionStamps = dict[str, Int64]
"""Table name -> int64 `[partitions]`, the stamp of each."""


def read_stamps(topology: Topology, catalog: Catalog, deadline: Deadline) -> PartitionStamps:
    """The stamps of all partitions of all tables, in one round trip.

    Raises:
        StoreBroken: a partition has none: it was lost.
    """
    told = topology.call([(key, ("HGET", key, STAMP_FIELD)) for key, _, _ in catalog.names], deadline)
    lost = [place for place, stamp in enumerate(told) if stamp is None or len(stamp) != 8]
    if lost:
        raise StoreBroken(
            f"redis at {topology.url} has lost the partition of {catalog.names[lost[0]][0].decode()!r} "
            f"({len(lost)} of {len(told)} partitions are gone): restore a checkpoint"
        )
    stamps = np.frombuffer(b"".join(told), "<i8").astype(np.int64)
    return {name: stamps[table.first : table.first + table.partitions] for name, table in catalog.tables.items()}


def require_way_back(
    topology: Topology, catalog: Catalog, stamps: PartitionStamps, version: int, deadline: Deadline
) -> None:
    """Makes sure that a commit can be taken back in every partition that it changed, before any is touched.

    Raises:
        StaleVersion: it cannot, as the next one has begun and has dropped what that needs.
    """
    keys = [
        catalog.names[table.first + int(partition)][2]
        for name, table in catalog.tables.items()
        for partition in np.flatnonzero(stamps[name] > version)
    ]
    field = Moment(version + 1).weights_field
    there = topology.call([(key, ("HEXISTS", key, field)) for key in keys], deadline)
    # A partition that only the broken-off commit after it changed needs no such image.
    later = topology.call([(key, ("HGET", key, Moment(version + 2).weights_field)) for key in keys], deadline)
    for held, value in zip(there, later, strict=True):
        if not held and not (value is not None and int.from_bytes(value[:8], "little") <= version):
            raise StaleVersion(
                f"the store at {topology.url} cannot go back to version {version}: the commit after the next one "
                "has begun, and has dropped before-images"
            )


def take_back(topology: Topology, catalog: Catalog, stamps: PartitionStamps, version: int, seconds: float) -> int:
    """Takes partitions of later stamps back, each in one transaction, until none is left; how many rows were.

    Args:
        topology: The servers.
        catalog: All tables.
        stamps: As they were read; updated.
        version: To go back to.
        seconds: Deadline of each round.

    Raises:
        StoreFailed: a before-image is not there.
    """
    taken = 0
    for name, table in catalog.tables.items():
        while len(beyond := np.flatnonzero(stamps[name] > version)):
            for start in range(0, len(beyond), _PARTITIONS_AT_ONCE):
                chosen = beyond[start : start + _PARTITIONS_AT_ONCE]
                taken += _take_back(topology, catalog, table, stamps[name], chosen, Deadline(seconds))
    return taken


def _take_back(
    topology: Topology, catalog: Catalog, table: TableKeys, stamps: Int64, chosen: Int64, deadline: Deadline
) -> int:
    """Takes the last change of some partitions of a table back."""
    slot_bytes = 4 * row_optimizer(table.spec.optimizer).slot_width(table.spec.dim)
    asked = [(int(partition), Moment(int(stamps[partition]))) for partition in chosen]
    images = {p: image for p, _, image in fetch_listed(topology, catalog, table, slot_bytes, asked, deadline)}
    for partition, name in asked:
        if partition not in images:
            raise StoreFailed(
                f"partition {partition} of table {table.spec.name!r} in redis at {topology.url} bears version "
                f"{name.version}, and has no before-images of it: go back to a checkpoint"
            )
    _write_images(topology, catalog, table, images, dict(asked), deadline)
    for partition, image in images.items():
        stamps[partition] = image.stamp
    return sum(len(image.ids) for image in images.values())


def _write_images(
    topology: Topology, catalog: Catalog, table: TableKeys, images: dict[int, BeforeImage],
    names: dict[int, Moment], deadline: Deadline,
) -> None:  # fmt: skip
    of = table.spec.name
    slot_bytes = next(iter(images.values())).slots.shape[1]
    held = np.concatenate([image.ids[: image.held] for image in images.values()]).astype(np.int64)
    block = block_with_slots(catalog, {of: held})
    rows = block.tables[of]
    packed = rows.weights.view(np.uint8) if rows.packed is None else rows.packed
    np.concatenate([image.weights for image in images.values()], out=packed.reshape(len(held), table.spec.weight_bytes))
    if slot_bytes:
        beside = rows.slots.view(np.uint8).reshape(len(held), slot_bytes)
        np.concatenate([image.slots for image in images.values()], out=beside)
    # Partitions in which there was no row before have nothing to write but their stamp.
    without = sorted(set(images) - set((block.weights["key"] - table.first).tolist()))
    bare = np.zeros(len(without), COMMAND)
    bare["key"] = table.first + np.array(without, np.int64)
    bare["stamped"] = 1
    whole = replace(
        block, weights=np.concatenate((block.weights, bare)), slots=np.concatenate((block.slots, np.zeros_like(bare)))
    )
    order = (whole.weights["key"] - table.first).tolist()
    stamps = np.array([images[partition].stamp for partition in order], np.int64)
    removals = [list(_removals(catalog, table, images[p], names[p], p)) for p in order]
    write_block(topology, whole, deadline, stamps, MoreCommands.of_parts(removals), packed=True)


def _removals(catalog: Catalog, table: TableKeys, image: BeforeImage, name: Moment, partition: int) -> Iterator[bytes]:
    """Commands that take out rows that there were not, and the image itself."""
    weights, slots, before = catalog.names[table.first + partition]
    absent = image.ids[image.held :]
    if len(absent):
        yield removal(weights, absent)
        if image.slots.shape[1]:
            yield removal(slots, absent)
    yield removal(before, np.empty(0, np.int64), (name.weights_field, name.slots_field))
