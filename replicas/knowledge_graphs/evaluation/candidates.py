"""Which entities compete in a ranking, or may answer a query: a list, or those of the answer's type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt8
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph import Sharding

__all__ = ["Candidates"]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The entities that a query's answer is ranked among; make them with `of_list` or `of_types`.

    Attributes:
        entities: int64 `[k]`, ascending global ids: the same for every query; None: every entity.
        types: int32 `[E]`: only entities of the type of the query's answer compete; None: of any type.
        members: uint8 `[E, bytes]`: the bits of each entity's types, where entities have several: those compete that
            share one with the answer.
    """

    entities: Int64 | None = None
    types: Int32 | None = None
    members: UInt8 | None = None

    @classmethod
    def of_list(cls, entities: npt.ArrayLike, count: int) -> Candidates:
        """A list of global ids, each counted once.

        Args:
            entities: int `[k]`.
            count: Number of entities, E.

        Raises:
            BadInput: no candidate at all.
            IdOutOfRange: a candidate is not an entity.
        """
        given = np.unique(np.asarray(entities))
        if not given.size or given.dtype.kind not in "iu":
            raise BadInput(f"candidates must be at least 1 global id, int [k]; got {given.dtype} {list(given.shape)}")
        if not 0 <= given[0] <= given[-1] < count:
            raise IdOutOfRange(f"candidates are in {given[0]} .. {given[-1]}; there are {count} entities")
        return cls(entities=given.astype(np.int64))

    @classmethod
    def of_types(cls, types: npt.ArrayLike, count: int, further: Int32 | None = None) -> Candidates:
        """Entities of the answer's type, or of one of its types.

        Args:
            types: int `[E]`.
            count: Number of entities, E.
            further: int `[K, 2]`: entity and type, for entities of several types.

        Raises:
            BadInput: types of another shape.
        """
        given = np.asarray(types)
        if given.shape != (count,) or given.dtype.kind not in "iu":
            raise BadInput(f"types of candidates must be integers [{count}]; got {given.dtype} {list(given.shape)}")
        if further is None or not len(further):
            return cls(types=given.astype(np.int32))
        has = np.zeros((count, int(max(given.max(), further[:, 1].max())) + 1), np.bool_)
        has[np.arange(count), given] = has[further[:, 0], further[:, 1]] = True
        return cls(types=given.astype(np.int32), members=np.packbits(has, axis=1))

    def rows(self, sharding: Sharding, shard: int) -> Int64 | None:
        """int64 `[c]`, ascending: a shard's rows that may compete; None: all."""
        if self.entities is None:
            return None
        mine = self.entities[sharding.shard_of[self.entities] == shard]
        return np.sort(sharding.row_of[mine]).astype(np.int64)

    def counted(self, answers: Int64, entities: Int64) -> Bools | None:
        """bool `[q, c]`: whether each of `entities` (int64 `[c]`) competes with each answer (int64 `[q]`, -1: none);
        None: all do."""
        if self.types is None:
            return None
        if self.members is not None:
            mine, others = self.members[answers], self.members[entities]
            shared = np.zeros((len(answers), len(entities)), np.bool_)
            for byte in range(mine.shape[1]):
                shared |= (mine[:, byte, None] & others[None, :, byte]) > 0
            return shared
        found: Bools = self.types[answers][:, None] == self.types[entities][None]
        return found
