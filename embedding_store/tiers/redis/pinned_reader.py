"""Reading a pinned version from Redis: rows as they lie, and before-images of what has changed since.

What is read is put together from several round trips, while a master commits:

1. the rows, with the stamps of their partitions;
2. the registry: whether the pin stands, and whether rows were put or deleted
   outside commits;
3. before-images of those partitions beyond what is known already. They were
   written in the transactions that changed the rows, so those of every change
   that step 1 saw are there by now;
4. the registry again, where something was fetched: the pin stands still, so
   nothing that it needs was dropped; and the owner's key is as it was before
   step 1, so no commit was taken back meanwhile and made anew with other rows.

Where a commit that broke off is being taken back, a partition may bear its
stamp in step 1 and have no before-image of it any more in step 3: then all of
it is done again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import DeadlineExceeded, StoreFailed
from elastable.embedding_store.tiers.redis.before_images import Moment
from elastable.embedding_store.tiers.redis.block import Block, RedisRows
from elastable.embedding_store.tiers.redis.catalog import TableKeys
from elastable.embedding_store.tiers.redis.past_images import ImageFetch, fetch_images
from elastable.embedding_store.tiers.redis.past_rows import PastRows
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.registry import Registry, read_registry
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transfer import read_block

__all__ = ["PinnedReader"]

_KEPT_BYTES = 256 << 20
_LOSSES = 5  # of a before-image: it may be on its way back into the table
_PAUSE_S = 0.005
_REMEMBERED = 64

_Layer = tuple[str, Moment, int]
"""Table, moment, bytes of slots."""


class PinnedReader:
    """Rows of pinned versions. For many threads at once.

    Before-images never change: what was fetched is kept, up to a bound.
    """

    def __init__(self, topology: Topology, namespace: str, kept_bytes: int = _KEPT_BYTES) -> None:
        self._topology, self._namespace, self._kept_bytes = topology, namespace, kept_bytes
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[int, bytes | None], Registry] = OrderedDict()
        self._owner: bytes | None = None  # under whom the layers were fetched
        self._layers: OrderedDict[_Layer, PastRows] = OrderedDict()  # the one used last is last

    def forget(self) -> None:
        """Drops what is kept."""
        with self._lock:
            self._seen.clear()
            self._layers.clear()

    def registry(self, deadline: Deadline) -> Registry:
        """Asks for it."""
        return read_registry(self._topology, self._namespace, deadline)

    def read(self, block: Block, version: int, token: bytes | None, deadline: Deadline) -> None:
        """Reads a block as it was at a pinned version.

        Args:
            block: To be filled; slots of tables for which it has room.
            version: That version.
            token: Of the pin that must stand; None: any of that version.
            deadline: Of everything together.

        Raises:
            StaleVersion, FutureVersion: the version is not pinned.
            StoreFailed, Unavailable, DeadlineExceeded: as `read_block`.
        """
        before = self._seen.get((version, token)) or self.registry(deadline)
        losses = 0
        while True:
            moment = before.pinned(version, token)
            stamps = read_block(self._topology, block, deadline).stamps
            now = self.registry(deadline)
            with self._alone(deadline):
                if now.owner == before.owner and now.pinned(version, token) == moment:
                    now, lost = self._complete(block, stamps, moment, now, deadline)
                    now.pinned(version, token)
                    if now.owner != before.owner:
                        self._layers.clear()  # they may hold what was fetched after that
                    elif lost is None:
                        self._apply(block, moment)
                        self._remember(version, token, now)
                        return
                    else:
                        losses += 1
                        if losses == _LOSSES:
                            raise lost
            before = now
            time.sleep(min(_PAUSE_S, deadline.left(self._topology.url)))

    def _complete(
        self, block: Block, stamps: Int64, moment: Moment, now: Registry, deadline: Deadline
    ) -> tuple[Registry, StoreFailed | None]:
        """Fetches what rows that were read need: the registry after that, and the error of what is not there."""
        if self._owner != now.owner:
            self._layers.clear()
            self._owner = now.owner
        fetched, lost = False, None
        for rows in block.tables.values():
            layer = self._layer(rows, moment)
            partitions = block.weights["key"][rows.commands] - rows.table.first
            needed = stamps[rows.commands]
            fetches = layer.missing(partitions, needed, now.serial)
            self._fetch(block, rows, layer, fetches, now.serial, deadline)
            fetched |= bool(fetches)
            gone = np.flatnonzero(layer.known[partitions, 0] < needed)
            if len(gone):
                partition = int(partitions[gone[0]])
                lost = StoreFailed(
                    f"redis at {self._topology.url} has lost before-images of partition {partition} of table "
                    f"{rows.table.spec.name!r}, which version {moment.version} needs"
                )
        return (self.registry(deadline) if fetched else now), lost

    def _fetch(
        self, block: Block, rows: RedisRows, layer: PastRows, fetches: list[ImageFetch], serial: int, deadline: Deadline
    ) -> None:
        slot_bytes = 4 * rows.slots.shape[1]
        images = fetch_images(self._topology, block.catalog, rows.table, slot_bytes, fetches, deadline)
        for partition, name, image in images:
            layer.add(partition, name, image)
        layer.listed[[fetch.partition for fetch in fetches if fetch.stamp is None]] = serial & ~1

    def _apply(self, block: Block, moment: Moment) -> None:
        for rows in block.tables.values():
            self._layer(rows, moment).apply(rows)
        while len(self._layers) and sum(layer.bytes for layer in self._layers.values()) > self._kept_bytes:
            self._layers.popitem(last=False)

    def _layer(self, rows: RedisRows, moment: Moment) -> PastRows:
        table: TableKeys = rows.table
        key = table.spec.name, moment, 4 * rows.slots.shape[1]
        layer = self._layers.get(key)
        if layer is None:
            layer = self._layers[key] = PastRows(table, key[2], moment)
        self._layers.move_to_end(key)
        return layer

    def _remember(self, version: int, token: bytes | None, now: Registry) -> None:
        self._seen[version, token] = now
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.left(self._topology.url)):
            raise DeadlineExceeded(f"another reader of {self._topology.url} has not ended in time")
        try:
            yield
        finally:
            self._lock.release()
