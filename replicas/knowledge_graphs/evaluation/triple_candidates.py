"""Candidates listed for each triple: an answer is ranked among the entities of its own list."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph import Side

__all__ = ["TripleCandidates"]


@dataclass(frozen=True, eq=False)
class TripleCandidates:
    """For every triple of a split, the entities that its head and its tail are ranked among; make it with `of`.

    An entity that a list has twice competes twice, as in OGB's evaluators; the answer itself never does.

    Attributes:
        heads, tails: int64 `[N, k]`, global ids in the order of the split's triples; -1: fewer than k.
    """

    heads: Int64
    tails: Int64

    @classmethod
    def of(cls, heads: npt.ArrayLike, tails: npt.ArrayLike, count: int) -> TripleCandidates:
        """Checked lists.

        Args:
            heads, tails: int `[N, k]`, -1 at padding; their k may differ.
            count: Number of entities, E.

        Raises:
            BadInput: other shapes or dtypes.
            IdOutOfRange: a candidate is not an entity; names the triple.
        """
        lists = []
        for side, given in (("heads", np.asarray(heads)), ("tails", np.asarray(tails))):
            if given.ndim != 2 or given.dtype.kind not in "iu":
                raise BadInput(
                    f"candidates of {side} must be integers [N, k], a list for each triple; got {given.dtype} "
                    f"{list(given.shape)}"
                )
            wrong = (given < -1) | (given >= count)
            if wrong.any():
                triple = int(np.argmax(wrong.any(axis=1)))
                entity = given[triple][wrong[triple]][0]
                raise IdOutOfRange(f"candidates of {side}, triple {triple}: {entity} is not one of {count} entities")
            lists.append(given.astype(np.int64))
        if len(lists[0]) != len(lists[1]):
            raise BadInput(f"there are candidates for {len(lists[0])} heads and {len(lists[1])} tails of the triples")
        return cls(*lists)

    def of_queries(self, side: Side, triple: Int64) -> Int64:
        """int64 `[q, k]`: the candidates of a side's queries, by positions of their triples (int64 `[q]`, -1: none)."""
        lists = self.heads if side == "head" else self.tails
        return np.where(triple[:, None] >= 0, lists[triple], -1)

    def require(self, triples: int) -> None:
        """Raises BadInput unless there are lists for so many triples."""
        if len(self.heads) != triples:
            raise BadInput(f"candidates are listed for {len(self.heads):,} triples; {triples:,} are ranked")
