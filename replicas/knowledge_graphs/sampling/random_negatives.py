"""Random candidates: of any entity, of the type of what they replace, and the tails of the step's other triples."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt64
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import SIDES
from elastable.replicas.knowledge_graphs.graph.known_triples import KnownTriples
from elastable.replicas.knowledge_graphs.graph.randomness import derived_keys, draw_between, stream_key
from elastable.replicas.knowledge_graphs.graph.sharding import Sharding
from elastable.replicas.knowledge_graphs.sampling.negatives import Exclude, NegativeSampler, StepTriples

_STREAM = 0x7E9E  # of a sampler's seed: which of an entity's types


class RandomNegatives(NegativeSampler):
    """Entities of a shard, drawn uniformly with replacement."""

    @property
    def _pads(self) -> bool:
        return False

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        ends = 2 if self.corruption == "ht" else 1
        sets = ends if self.shared else self.sharding.shards * step.block
        count = self.sharding.counts[shards][:, None]
        drawn = draw_between(keys, np.zeros_like(count), count, sets * self.count)
        return drawn.reshape(len(keys), sets, self.count), None


class TypedNegatives(NegativeSampler):
    """Entities of the replaced entity's type, drawn uniformly with replacement.

    They are drawn for each triple and cannot be shared. If a shard has no entity of the type, its candidates are
    padding and masked. For a triple whose replaced entity has several types, one of them is drawn first.

    Args:
        sharding, count: As of `NegativeSampler`.
        further_types: int `[K, 2]`: entity and type, besides the types of the sharding; None: each entity has one.
        settings: Further arguments of `NegativeSampler`.
    """

    _shareable = False

    def __init__(self, sharding: Sharding, count: int, *, further_types: Int32 | None = None, **settings: Any) -> None:
        super().__init__(sharding, count, **settings)
        self._members = TypeMembers.create(sharding, further_types)

    def settings(self) -> str:
        return f"{super().settings()} types={len(self._members.types)}"

    @property
    def _pads(self) -> bool:
        return self._members.some_shard_lacks_a_type

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        kinds = np.stack([self._types(step, int(worker)) for worker in workers])
        first, count = self._members.spans(shards[:, None], kinds)
        rows = self._members.rows[draw_between(keys, first, count, self.count)]
        return rows, np.broadcast_to(count[..., None] > 0, rows.shape) if self._pads else None

    def _types(self, step: StepTriples, worker: int) -> Int64:
        """int64 `[n * p]`: the type of the entity that each triple's candidates replace; any type at padding."""
        triples = step.of(worker).triples
        replaced = np.empty(len(triples), np.int64)
        for side in SIDES:
            which = self.corrupted(side, step.block)
            replaced[which] = triples[which, 0 if side == "head" else 2]
        key = derived_keys(stream_key(self.seed, _STREAM, step.step), np.array([worker]))
        return self._members.drawn_type(replaced, key)


class AugmentedNegatives(RandomNegatives):
    """Random candidates for tails, shared by the step's triples, and the tails of all its triples.

    So a triple is scored with the tail of every other triple of the step, on whichever worker that is: as many as
    without shards. Its own answer does not count, nor does padding; with `known`, no true answer does.

    Args:
        sharding, count: As of `NegativeSampler`.
        known: The true triples, to mask them; None: only a triple's own answer is masked.
        settings: The `seed`, `total` and `tell_entities` of `NegativeSampler`.
    """

    def __init__(self, sharding: Sharding, count: int, *, known: KnownTriples | None = None, **settings: Any) -> None:
        exclude: Exclude = "answer" if known is None else "known"
        super().__init__(sharding, count, corruption="t", shared=True, exclude=exclude, known=known, **settings)

    @property
    def _pads(self) -> bool:
        return True

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        drawn, _ = super()._draw(keys, shards, workers, step)
        met = {shard: self._met(int(shard), step) for shard in np.unique(shards)}
        rows = np.stack([met[shard][0] for shard in shards])[:, None]
        valid = np.stack([met[shard][1] for shard in shards])[:, None]
        # Random ones last: the last of them is padding where shards draw one fewer in turn.
        return np.concatenate([rows, drawn], axis=2), np.concatenate([valid, np.ones(drawn.shape, np.bool_)], axis=2)

    def _met(self, shard: int, step: StepTriples) -> tuple[Int32, Bools]:
        """The step's tails on a shard, int32 `[n * p]`, and which of them are there, once for each triple."""
        block = slice(shard * step.block, (shard + 1) * step.block)
        found = [step.of(worker) for worker in range(self.sharding.shards)]
        tails = np.concatenate([each.triples[block, 2] for each in found])
        source = np.concatenate([each.source[block] for each in found])
        first = np.zeros(len(source), np.bool_)
        first[np.unique(source, return_index=True)[1]] = True  # padding repeats a triple
        there = (source >= 0) & first
        return np.where(there, self.sharding.row_of[np.maximum(tails, 0)], 0).astype(np.int32), there


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
    def create(cls, sharding: Sharding, further: Int32 | None = None) -> "TypeMembers":
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
