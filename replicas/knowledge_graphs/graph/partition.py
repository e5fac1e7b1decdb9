"""Triples grouped by the shards of their ends, and the inverse triples of reciprocal relations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int32, Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph.sharding import Sharding

__all__ = ["PartitionMode", "PartitionedTriples", "checked_triples", "with_inverses"]

PartitionMode = Literal["pair", "head", "tail"]


@dataclass(frozen=True, eq=False)
class PartitionedTriples:
    """Triples grouped by shards; within a group they keep their order.

    Attributes:
        sharding: Sharding of the entities.
        mode: "pair": by the shards of head and tail, for training; "head" or "tail": by
            the shard of that end, for queries.
        triples: int32 `[N, 3]`: head, relation, tail, global ids, group after group.
        source: int64 `[N]`: position of each in the input array.
        counts: int64 `[n, n]` (by head's and tail's shard) or `[n]`: triples of each group; a group may be empty.
        offsets: int64, of the same shape: where each group begins.
    """

    sharding: Sharding
    mode: PartitionMode
    triples: Int32
    source: Int64
    counts: Int64
    offsets: Int64

    @classmethod
    def create(cls, triples: npt.ArrayLike, sharding: Sharding, mode: PartitionMode = "pair") -> PartitionedTriples:
        """Groups triples.

        Args:
            triples: int `[N, 3]`: head, relation, tail. With mode "head" a tail may
                be -1, with mode "tail" a head: the queried end.
            sharding: Sharding of the entities.
            mode: See the class.

        Raises:
            BadInput: malformed triples or an unknown mode.
            IdOutOfRange: an entity has no shard.
        """
        if mode not in get_args(PartitionMode):
            raise BadInput(f"partition mode {mode!r}: known are {', '.join(get_args(PartitionMode))}")
        unknown = {"pair": (), "head": (2,), "tail": (0,)}[mode]
        given = checked_triples(triples, sharding.entities, unknown_in=unknown)
        shards = sharding.shards
        if mode == "pair":
            group = sharding.shard_of[given[:, 0]].astype(np.int64) * shards + sharding.shard_of[given[:, 2]]
        else:
            group = sharding.shard_of[given[:, 0 if mode == "head" else 2]].astype(np.int64)
        shape = (shards, shards) if mode == "pair" else (shards,)
        counts = np.bincount(group, minlength=int(np.prod(shape))).astype(np.int64)
        source = np.argsort(group, kind="stable")
        return cls(
            sharding=sharding,
            mode=mode,
            triples=given[source],
            source=source,
            counts=counts.reshape(shape),
            offsets=(np.cumsum(counts) - counts).reshape(shape),
        )

    def __len__(self) -> int:
        return len(self.triples)


def with_inverses(triples: npt.ArrayLike, relations: int) -> Int32:
    """The triples, then the inverse of each: (tail, relation + relations, head).

    A query (?, relation, tail) becomes (tail, relation + relations, ?): a model
    with reciprocal relations answers tail queries only (Lacroix, Usunier and Obozinski,
    "Canonical tensor decomposition for knowledge base completion", ICML 2018).

    Args:
        triples: int `[N, 3]`.
        relations: Number of relations, R.

    Returns:
        int32 `[2 N, 3]`, with relations 0 .. 2 R - 1.

    Raises:
        IdOutOfRange: a relation outside 0 .. R - 1.
    """
    given = checked_triples(triples, 2**31 - 1, unknown_in=(0, 2))
    if given.size and not 0 <= given[:, 1].min() <= given[:, 1].max() < relations:
        raise IdOutOfRange(
            f"inverse triples: relations are in {given[:, 1].min()} .. {given[:, 1].max()}, not in 0 .. {relations - 1}"
        )
    inverse = given[:, ::-1] + np.array([0, relations, 0], np.int32)
    return np.concatenate([given, inverse])


def checked_triples(triples: npt.ArrayLike, entities: int, *, unknown_in: tuple[int, ...] = ()) -> Int32:
    """Triples as int32 `[N, 3]`, C-contiguous.

    Args:
        triples: int `[N, 3]`.
        entities: Heads and tails are in 0 .. entities - 1.
        unknown_in: Columns that may contain -1.

    Raises:
        BadInput: another shape or dtype, or a relation out of range.
        IdOutOfRange: an entity out of range; names the first such triple.
    """
    given = np.asarray(triples)
    if given.ndim != 2 or given.shape[1] != 3 or given.dtype.kind not in "iu":
        raise BadInput(f"triples must be integers [N, 3] (head, relation, tail); got {given.dtype} {list(given.shape)}")
    for column, what in ((0, "head"), (2, "tail")):
        least = -1 if column in unknown_in else 0
        wrong = (given[:, column] < least) | (given[:, column] >= entities)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise IdOutOfRange(f"triple {place}: {what} {given[place, column]} is not one of {entities} entities")
    if len(given) >= 2**31:
        raise BadInput(f"{len(given)} triples; there may be no more than 2**31 - 1")
    wrong = (given[:, 1] < 0) | (given[:, 1] >= 2**30)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise BadInput(f"triple {place}: relation {given[place, 1]} is not in 0 .. 2**30 - 1")
    return np.ascontiguousarray(given, np.int32)
