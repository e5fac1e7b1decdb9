"""The rows of each type on each shard, where an entity may have several types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int32, Int64, UInt64
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import Sharding, draw_between

__all__ = ["TypeMembers"]


@dataclass(frozen=True, eq=False)
class TypeMembers:
    """Entities by type, and types by entity, as compressed sparse rows.

    Attributes:
        rows: int32 `[M]`: rows of shards, by shard and type; ends with one row more than there are members.
        offsets: int64 `[n, T + 1]`: the rows of type t on shard s are `rows[offsets[s, t]:offsets[s, t + 1]]`.
        types: int32 `[M]`: the types of each entity.
        ends: int64 `[E + 1]`: those of entity e are `types[ends[e]:ends[e + 1]]`.
    """

    rows: Int32
    offsets: Int64
    types: Int32
    ends: Int64

    @classmethod
    def create(cls, sharding: Sharding, further: Int32 | None = None) -> TypeMembers:
        """Lists members.

        Args:
            sharding: Knows one type of each entity.
            further: int `[K, 2]`: entity and type, besides those.

        Raises:
            BadInput: an entity or a type that does not exist.
        """
        first = np.stack([np.arange(sharding.entities), sharding.entity_types], axis=1).astype(np.int64)
        more = np.empty((0, 2), np.int64) if further is None else np.asarray(further, np.int64).reshape(-1, 2)
        kinds = max(int(sharding.entity_types.max()), int(more[:, 1].max(initial=0))) + 1
        if more.size and (more.min() < 0 or more[:, 0].max() >= sharding.entities):
            raise BadInput(f"types of entities outside 0 .. {sharding.entities - 1}, or below 0")
        pairs = np.unique(np.concatenate([first, more]), axis=0)  # by entity, then type
        shard, row = sharding.shard_of[pairs[:, 0]], sharding.row_of[pairs[:, 0]]
        order = np.lexsort((row, pairs[:, 1], shard))
        counts = np.bincount(shard.astype(np.int64) * kinds + pairs[:, 1], minlength=sharding.shards * kinds)
        ends = np.append(0, np.cumsum(counts))
        offsets = np.stack([ends[s * kinds : (s + 1) * kinds + 1] for s in range(sharding.shards)])
        members = np.bincount(pairs[:, 0], minlength=sharding.entities)
        return cls(
            np.append(row[order], 0).astype(np.int32),
            offsets.astype(np.int64),
            pairs[:, 1].astype(np.int32),
            np.append(0, np.cumsum(members)).astype(np.int64),
        )

    @property
    def some_shard_lacks_a_type(self) -> bool:
        """Whether candidates may be padding."""
        return bool((np.diff(self.offsets, axis=1) == 0).any())

    def spans(self, shards: Int64, types: Int64) -> tuple[Int64, Int64]:
        """Where the rows of types on shards begin, and their numbers; int64, of the arguments' common shape."""
        first = self.offsets[shards, types]
        return first, self.offsets[shards, types + 1] - first

    def drawn_type(self, entities: Int64, key: UInt64) -> Int64:
        """int64 `[k]`: one of the types of each entity (int64 `[k]`, -1: any); `key` is uint64 `[1]`."""
        first = self.ends[entities]
        count = np.where(entities < 0, 0, self.ends[entities + 1] - first)
        if count.max(initial=0) <= 1:
            return self.types[np.where(count, first, 0)].astype(np.int64)
        drawn = draw_between(key, first[None], count[None], 1)[0, :, 0]
        return self.types[drawn].astype(np.int64)
