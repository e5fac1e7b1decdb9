"""Before-images fetched from the servers: those of some partitions that lie beyond a moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastable.embedding_store.tiers.redis.before_images import FIELD_BYTES, BeforeImage, Moment, decode_before
from elastable.embedding_store.tiers.redis.catalog import Catalog, TableKeys
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.topology import Topology

__all__ = ["ImageFetch", "fetch_images", "fetch_listed"]

_ASKED_FOR = 64  # versions that are asked for blindly: more than that are listed first
_FIELDS_A_CALL = 256  # values in memory at once, at most


@dataclass(frozen=True, slots=True)
class ImageFetch:
    """Before-images to fetch.

    Attributes:
        partition: Of the table.
        beyond: Those after this moment.
        stamp: Up to those that the commit of this version left; None: all there are.
    """

    partition: int
    beyond: Moment
    stamp: int | None


def fetch_images(
    topology: Topology, catalog: Catalog, table: TableKeys, slot_bytes: int, fetches: Sequence[ImageFetch],
    deadline: Deadline,
) -> Iterator[tuple[int, Moment, BeforeImage]]:  # fmt: skip
    """Fetches before-images, oldest first in each partition.

    Args:
        topology: The servers.
        catalog: All tables.
        table: The table.
        slot_bytes: Of a row; 0: without slots.
        fetches: What of which partition.
        deadline: Of everything together.

    Yields:
        Partition, name and image.

    Raises:
        StoreFailed, Unavailable, DeadlineExceeded: as `Topology.call`.
    """
    listed = [fetch for fetch in fetches if fetch.stamp is None or fetch.stamp - fetch.beyond.version > _ASKED_FOR]
    asked = [
        (fetch.partition, Moment(version))
        for fetch in fetches
        if fetch.stamp is not None and fetch not in listed
        for version in range(fetch.beyond.version + 1, fetch.stamp + 1)
    ]
    keys = [catalog.names[table.first + fetch.partition][2] for fetch in listed]
    told = topology.call([(key, ("HKEYS", key)) for key in keys], deadline)
    for fetch, fields in zip(listed, told, strict=True):
        names = sorted(Moment.of_field(field) for field in fields if len(field) == FIELD_BYTES)
        asked += [(fetch.partition, name) for name in names if name > fetch.beyond]
    yield from fetch_listed(topology, catalog, table, slot_bytes, asked, deadline)


def fetch_listed(
    topology: Topology, catalog: Catalog, table: TableKeys, slot_bytes: int, asked: Sequence[tuple[int, Moment]],
    deadline: Deadline,
) -> Iterator[tuple[int, Moment, BeforeImage]]:  # fmt: skip
    """Fetches before-images by partition and name; those that there are not are passed over."""
    weight_bytes = table.spec.weight_bytes
    for start in range(0, len(asked), _FIELDS_A_CALL):
        part = asked[start : start + _FIELDS_A_CALL]
        commands = []
        for partition, name in part:
            key = catalog.names[table.first + partition][2]
            fields = (name.weights_field, name.slots_field) if slot_bytes else (name.weights_field,)
            commands.append((key, ("HMGET", key, *fields)))
        for (partition, name), values in zip(part, topology.call(commands, deadline), strict=True):
            if values[0] is not None:
                yield (
                    partition,
                    name,
                    decode_before(values[0], weight_bytes, *values[1:], *([slot_bytes] * (len(values) - 1))),
                )
