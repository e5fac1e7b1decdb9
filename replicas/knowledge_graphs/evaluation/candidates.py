"""Which entities compete in a ranking, or may answer a query: a list, or those of the answer's type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph.batch import Bools, Int32
from elastable.replicas.knowledge_graphs.graph.sharding import Sharding

__all__ = ["Candidates"]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The entities that a query's answer is ranked among; make them with `of_list` or `of_types`.

    Attributes:
        entities: int64 `[k]`, ascending global ids: the same for every query; None: every entity.
        types: int32 `[E]`: only entities of the type of the query's answer compete; None: of any type.
    """

    entities: Int64 | None = None
    types: Int32 | None = None

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
    def of_types(cls, types: npt.ArrayLike, count: int) -> Candidates:
        """Entities of the answer's type.

        Args:
            types: int `[E]`.
            count: Number of entities, E.

        Raises:
            BadInput: types of another shape.
        """
        given = np.asarray(types)
        if given.shape != (count,) or given.dtype.kind not in "iu":
            raise BadInput(f"types of candidates must be integers [{count}]; got {given.dtype} {list(given.shape)}")
        return cls(types=given.astype(np.int32))

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
        found: Bools = self.types[answers][:, None] == self.types[entities][None]
        return found
