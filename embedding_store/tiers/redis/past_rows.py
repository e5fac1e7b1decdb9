"""Rows as they were at a pinned moment: what was changed since, from before-images, oldest first."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.ids.id_index import IdIndex
from elastable.embedding_store.tiers.redis.before_images import BeforeImage, Moment
from elastable.embedding_store.tiers.redis.block import RedisRows
from elastable.embedding_store.tiers.redis.catalog import TableKeys
from elastable.embedding_store.tiers.redis.past_images import ImageFetch
from elastable.embedding_store.tiers.redis.resp_codec import Bytes

__all__ = ["PastRows"]

_FIRST_ROWS = 1024
_INDEX_BYTES = 33  # of an id, at most


class PastRows:
    """The rows of one table that changed after a moment, as they were then. Callers do the locking.

    Attributes:
        moment: That moment.
        known: int64 `[partitions, 2]`: up to which (version, serial) each
            partition's before-images were added.
        listed: int64 `[partitions]`: the serial of the store up to which they
            were looked for outside commits, too.
    """

    def __init__(self, table: TableKeys, slot_bytes: int, moment: Moment) -> None:
        """`slot_bytes`: of a row; 0: slots are left out."""
        self.moment = moment
        self.known = np.full((table.partitions, 2), moment, np.int64)
        self.listed = np.full(table.partitions, moment.serial, np.int64)
        self._index = IdIndex()
        self._weights: Bytes = np.empty((_FIRST_ROWS, table.spec.weight_bytes), np.uint8)
        self._slots: Bytes = np.empty((_FIRST_ROWS, slot_bytes), np.uint8)
        self._held = np.empty(_FIRST_ROWS, np.bool_)

    @property
    def bytes(self) -> int:
        """Of memory, about."""
        row_bytes = self._weights.shape[1] + self._slots.shape[1] + 1
        return int(self.known.nbytes + len(self._held) * row_bytes + self._index.count * _INDEX_BYTES)

    def missing(self, partitions: Int64, stamps: Int64, serial: int) -> list[ImageFetch]:
        """What has to be fetched for rows that were just read.

        Args:
            partitions: int64 `[n]`, of the rows.
            stamps: int64 `[n]`, of those partitions, as they came with the rows.
            serial: Of the store, read after the rows.
        """
        listed = self.listed[partitions] >= serial
        behind = np.flatnonzero((self.known[partitions, 0] < stamps) | ~listed)
        return [
            ImageFetch(
                int(partitions[i]), Moment(*self.known[partitions[i]].tolist()), int(stamps[i]) if listed[i] else None
            )
            for i in behind
        ]

    def add(self, partition: int, name: Moment, image: BeforeImage) -> None:
        """Adds a before-image of a partition, younger than all that were added of it."""
        places = np.empty(len(image.ids), np.int64)
        self._index.find(image.ids, places)
        fresh = np.flatnonzero(places < 0)  # of the others an older image tells
        if len(fresh):
            ids = np.ascontiguousarray(image.ids[fresh])
            self._index.reserve(len(ids))
            self._index.claim(ids, places[: len(ids)])
            at = places[: len(ids)]
            self._grow(self._index.positions_given)
            held = fresh < image.held
            self._held[at] = held
            self._weights[at[held]] = image.weights[fresh[held]]
            if self._slots.shape[1]:
                self._slots[at[held]] = image.slots[fresh[held]]
        self.known[partition] = name

    def apply(self, rows: RedisRows) -> None:
        """Puts rows that were read back to what they were; `no_weights` and `no_slots` tell of those there were not."""
        places = np.empty(len(rows.ids), np.int64)
        if self._index.find(rows.ids, places) == len(places):
            return
        changed = np.flatnonzero(places >= 0)
        at = places[changed]
        held = self._held[at]
        rows.no_weights[changed] = ~held
        weights = rows.weights.view(np.uint8) if rows.packed is None else rows.packed
        weights.reshape(len(rows.ids), self._weights.shape[1])[changed[held]] = self._weights[at[held]]
        if self._slots.shape[1]:
            rows.no_slots[changed] = ~held
            rows.slots.view(np.uint8).reshape(len(rows.ids), self._slots.shape[1])[changed[held]] = self._slots[
                at[held]
            ]
        rows.unpack()

    def held_ids(self) -> Int64:
        """int64: ids that had a row then, and were changed since."""
        ids = self._index.row_ids
        return ids[self._held[: len(ids)]].copy()

    def _grow(self, rows: int) -> None:
        if rows > len(self._held):
            more = max(rows, 2 * len(self._held)) - len(self._held)
            self._weights = np.concatenate((self._weights, np.empty((more, self._weights.shape[1]), np.uint8)))
            self._slots = np.concatenate((self._slots, np.empty((more, self._slots.shape[1]), np.uint8)))
            self._held = np.concatenate((self._held, np.empty(more, np.bool_)))
