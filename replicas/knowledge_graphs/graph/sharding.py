"""Which shard and row hold an entity, each type spread evenly; and triples grouped by the shards of their ends."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Array, Int32, Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph.names import replaced
from elastable.replicas.knowledge_graphs.graph.randomness import permutation, stream_key
from elastable.replicas.knowledge_graphs.graph.triple_files import DAMAGED

_STREAM = 0x5A4D  # the sharding's random stream
_FORMAT = 1
_MOST_TYPES = 1 << 20


@dataclass(frozen=True, eq=False)
class Sharding:
    """The shard and row of every entity; `entity_at` is the inverse.

    Attributes:
        shard_of: int32 `[E]`.
        row_of: int32 `[E]`.
        entity_at: int64 `[n, rows]`: the entity of each row; -1 in the last row of a
            shard with one entity fewer than the others.
        counts: int64 `[n]`: entities of each shard; they differ by 1 at most.
        entity_types: int32 `[E]`; 0 if there are no types. A shard has those of a type in contiguous rows, and their
            numbers on two shards differ by 1 at most.
    """

    seed: int
    shard_of: Int32
    row_of: Int32
    entity_at: Int64
    counts: Int64
    entity_types: Int32

    @classmethod
    def create(
        cls, entities: int, shards: int, *, seed: int = 0, entity_types: npt.ArrayLike | None = None
    ) -> "Sharding":
        """Deals out the entities, shuffled within each type, type after type, to the shards in turn.

        Args:
            entities: Number of entities, E.
            shards: Number of workers, n.
            entity_types: int `[E]`, from 0; None: all are of type 0.

        Raises:
            BadInput: fewer entities than shards, or malformed types.
        """
        if shards < 1:
            raise BadInput(f"sharding of entities: shards must be at least 1, got {shards}")
        if not shards <= entities < 2**31:
            raise BadInput(
                f"sharding of entities: {entities} entities cannot be spread over {shards} workers; every worker needs "
                f"at least one (and there may be no more than 2**31 - 1)"
            )
        types = _checked_types(entity_types, entities)
        shuffled = permutation(entities, stream_key(seed, _STREAM, 0))
        dealt = shuffled[np.argsort(types[shuffled], kind="stable")]  # by type; shuffled within
        first = permutation(shards, stream_key(seed, _STREAM, 1))  # which shards get one more is random, too
        shard_of = np.empty(entities, np.int32)
        row_of = np.empty(entities, np.int32)
        shard_of[dealt] = np.resize(first, entities)
        row_of[dealt] = np.arange(entities) // shards
        return cls._of(seed, shards, shard_of, row_of, types)

    @classmethod
    def _of(cls, seed: int, shards: int, shard_of: Int32, row_of: Int32, types: Int32) -> "Sharding":
        entities = len(shard_of)
        counts = np.bincount(shard_of, minlength=shards)
        entity_at = np.full((shards, -(-entities // shards)), -1, np.int64)
        entity_at[shard_of, row_of] = np.arange(entities)
        return cls(seed, shard_of, row_of, entity_at, counts, types)

    @property
    def shards(self) -> int:
        """Number of shards, n."""
        return len(self.entity_at)

    @property
    def entities(self) -> int:
        """Number of entities, E."""
        return len(self.shard_of)

    @property
    def rows(self) -> int:
        """Rows of each shard's table, padding included: `ceil(E / n)`."""
        return int(self.entity_at.shape[1])

    def held_by(self, shard: int) -> Int64:
        """int64 `[counts[shard]]`: the entities of a shard, in the order of its rows."""
        return self.entity_at[shard, : self.counts[shard]]

    def place_of(self, entities: npt.NDArray[np.integer]) -> Int64:
        """int64, of the shape of `entities`: `shard * rows + row`, the row in the concatenated tables of all shards."""
        places: Int64 = self.shard_of[entities].astype(np.int64) * self.rows + self.row_of[entities]
        return places

    def shard_table(self, table: Array, shard: int) -> Array:
        """`[rows, ...]`: one shard of a table `[E, ...]`; padding rows are zero."""
        part = np.zeros((self.rows, *table.shape[1:]), table.dtype)
        part[: self.counts[shard]] = table[self.held_by(shard)]
        return part

    def whole_table(self, parts: Array) -> Array:
        """`[E, ...]`: the table of all shards' `[n, rows, ...]`, without padding rows."""
        whole: Array = parts[self.shard_of, self.row_of]
        return whole

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the sharding as a .npz file; replaces an existing one."""
        form, seed, shards = np.array([_FORMAT, self.seed, self.shards], np.int64)
        of, row, types = self.shard_of, self.row_of, self.entity_types
        with replaced(path) as file:
            np.savez(file, format=form, seed=seed, shards=shards, shard_of=of, row_of=row, entity_types=types)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Sharding":
        """Reads what `save` wrote. Raises BadInput for a missing or malformed file."""
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as saved:
                if int(saved["format"]) != _FORMAT:
                    raise BadInput(f"{path}: format {int(saved['format'])} of a sharding; this program reads {_FORMAT}")
                seed, shards = int(saved["seed"]), int(saved["shards"])
                shard_of, row_of = saved["shard_of"].astype(np.int32), saved["row_of"].astype(np.int32)
                if not 1 <= shards <= len(shard_of) or row_of.min() < 0:
                    raise BadInput(f"{path}: not a sharding of {len(shard_of)} entities over {shards} workers")
                types = _checked_types(saved["entity_types"], len(shard_of))
                found = cls._of(seed, shards, shard_of, row_of, types)
        except DAMAGED as error:
            if isinstance(error, BadInput) and str(path) in str(error):
                raise
            raise BadInput(f"{path}: not a saved sharding of entities ({error})") from error
        placed = np.bincount(found.entity_at[found.entity_at >= 0], minlength=found.entities)
        if (placed != 1).any():
            raise BadInput(f"{path}: not a sharding of entities: two of them are in one row")
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharding) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("shard_of", "row_of", "entity_types")
        )

    __hash__ = None  # type: ignore[assignment]


def _checked_types(entity_types: npt.ArrayLike | None, entities: int) -> Int32:
    if entity_types is None:
        return np.zeros(entities, np.int32)
    types = np.asarray(entity_types)
    if types.shape != (entities,) or types.dtype.kind not in "iu":
        raise BadInput(f"entity types must be integers [{entities}], one an entity; got {types.dtype} {types.shape}")
    if types.min() < 0 or types.max() >= _MOST_TYPES:
        raise BadInput(f"entity types must be numbered from 0, below {_MOST_TYPES}; got {types.min()} to {types.max()}")
    return types.astype(np.int32)


PartitionMode = Literal["pair", "head", "tail"]


@dataclass(frozen=True, eq=False)
class PartitionedTriples:
    """Triples grouped by shards; within a group they keep their order.

    Attributes:
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
    def create(cls, triples: npt.ArrayLike, sharding: Sharding, mode: PartitionMode = "pair") -> "PartitionedTriples":
        """Groups triples.

        Args:
            triples: int `[N, 3]`: head, relation, tail. With mode "head" a tail may
                be -1, with mode "tail" a head: the queried end.

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
