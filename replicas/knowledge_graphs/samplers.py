"""Samplers: a step's triples, as many from every shardpair, and their weights; their candidates, and which count."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Float32, Int32, Int64, UInt64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph.batch import (
    CORRUPTIONS,
    Corruption,
    Negatives,
    Side,
    StepBatch,
    asked_sides,
)
from elastable.replicas.knowledge_graphs.graph.randomness import (
    derived_keys,
    draw_between,
    shuffled_segments,
    stream_key,
)
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding


@dataclass(frozen=True)
class StepTriples:
    """All workers' triples in one step, computed on request.

    Attributes:
        step: Number of the step, from 0.
        block: Triples of each shardpair, p.
        of: Worker -> its triples, int32 `[n * p, 3]`, global ids, -1 if a shardpair has none; and their positions in
            the partitioned array, int64 `[n * p]`, or -1.
    """

    step: int
    block: int
    of: Callable[[int], tuple[Int32, Int64]]


class ShardedSampler(ABC):
    """Batches as a pure function of (settings, step, worker): any worker can compute any batch, in any order.

    So a run's position is one number, and a run resumed at a step continues
    with the same batches. All methods are thread-safe.

    Args:
        partition: The training triples.
        batch_per_worker: Least number of triples of a worker's step; rounded up to n
            blocks of one size (an even one for corruption "ht").
        seed: Seed of the order of triples.
        negatives: Draws their candidates; None: the batches have none.
        weights: float32 `[N]` by `partition.triples`, with mean 1 (`frequency_weights`); None: all weights are 1.

    Attributes:
        block: Triples of each shardpair in a step, p; a worker's step has `n * p`.

    Raises:
        BadInput: no triples, a batch below 1, or weights or candidates that do not fit.
    """

    def __init__(
        self,
        partition: PartitionedTriples,
        batch_per_worker: int,
        *,
        seed: int = 0,
        negatives: "RandomNegatives | None" = None,
        weights: Float32 | None = None,
    ) -> None:
        if not len(partition):
            raise BadInput("a batch sampler needs at least one triple; got none")
        if batch_per_worker < 1:
            raise BadInput(f"a batch has at least 1 triple a worker, got {batch_per_worker}")
        if weights is not None and weights.shape != (len(partition),):
            raise BadInput(f"weights must be [{len(partition)}], one a triple; got {list(weights.shape)}")
        if negatives is not None and negatives.sharding != partition.sharding:
            raise BadInput("the candidates and the triples are of two different shardings of the entities")
        self.partition, self.negatives, self.seed = partition, negatives, seed
        self._weights = np.ones(len(partition), np.float32) if weights is None else weights.astype(np.float32)
        self._counts, self._offsets = partition.counts.reshape(-1), partition.offsets.reshape(-1)
        self._halved = negatives is not None and negatives.corruption == "ht"
        block = -(-batch_per_worker // partition.sharding.shards)
        self.block = block + (block % 2 if self._halved else 0)

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps that visit every triple once (in a random sampler, on average)."""

    @abstractmethod
    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        """The triples of these shardpairs in a step.

        Args:
            step: From 0.
            pairs: int64 `[k]`, each `head's shard * n + tail's shard`.

        Returns:
            int64 `[k, p]`, positions in `partition.triples`, -1 if a pair has none; bool `[k, p]`, False at padding.
        """

    @abstractmethod
    def _present(self, step: int) -> int:
        """Number of all workers' triples in a step, without padding."""

    def _pair_weights(self) -> Float32:
        """float32 `[n * n]`: factor of the weights of each shardpair's triples."""
        return np.ones(self._counts.size, np.float32)

    def batch(self, step: int, worker: int) -> StepBatch:
        """One worker's part of a step, counted from 0 through all epochs. Raises BadInput if there is none."""
        partition, n = self.partition, self.partition.sharding.shards
        if step < 0 or not 0 <= worker < n:
            raise BadInput(f"batch of step {step} for worker {worker}: steps count from 0, workers are 0 .. {n - 1}")
        others = np.arange(n)
        pairs = np.append(worker * n + others, others * n + worker)
        triple, mask = self._place(step, pairs)
        met = self._triples(triple)  # -1 (no triple) reads some row, which is replaced by 0
        rows = np.where(triple[..., None] < 0, 0, partition.sharding.row_of[met[..., [0, 2]]])
        weight = self._weights[triple[:n]] * self._pair_weights()[pairs[:n], None] * mask[:n]
        return StepBatch(
            step=step,
            worker=worker,
            head=np.ascontiguousarray(rows[:n, :, 0]),
            relation=np.where(triple[:n] < 0, 0, met[:n, :, 1]),
            tail=np.ascontiguousarray(rows[n:, :, 1]),
            triple=triple[:n],
            mask=mask[:n],
            weight=weight,
            present=self._present(step),
            negatives=None if self.negatives is None else self.negatives.draw(self._step_triples(step), worker),
        )

    def _step_triples(self, step: int) -> StepTriples:
        """All workers' triples in a step; each worker's are computed once."""
        shards = self.partition.sharding.shards

        @lru_cache(maxsize=shards)
        def of(worker: int) -> tuple[Int32, Int64]:
            place = self._place(step, worker * shards + np.arange(shards))[0].reshape(-1)
            return self._triples(place), np.where(place < 0, -1, self.partition.source[place])

        return StepTriples(step, self.block, of)

    def _triples(self, place: Int64) -> Int32:
        """int32 `[..., 3]`: the triples at positions `[...]`, -1 for position -1."""
        return np.where(place[..., None] < 0, np.int32(-1), self.partition.triples[place])


_RIGID_STREAM = 0x0BDE  # of the sampler's seed
_EPOCHS_HELD = 2  # the current one, and the next one that a thread ahead has started


class RigidSampler(ShardedSampler):
    """Every triple once per epoch, in a different order each time.

    An epoch has as many steps as the fullest shardpair needs. The triples of every shardpair are spread evenly over
    them, and short blocks are padded, so steps hardly differ in the number of triples.
    Arguments as of `ShardedSampler`.
    """

    def __init__(self, partition: PartitionedTriples, batch_per_worker: int, **settings: Any) -> None:
        super().__init__(partition, batch_per_worker, **settings)
        self._steps = -(-int(self._counts.max()) // self.block)
        self._order = lru_cache(_EPOCHS_HELD)(self._shuffled)

    @property
    def steps_per_epoch(self) -> int:
        return self._steps

    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        epoch, part = divmod(step, self._steps)
        counts = self._counts[pairs]
        begin, end = counts * part // self._steps, counts * (part + 1) // self._steps
        # The half that gets an odd triple alternates with step and pair, so that both ends are corrupted equally often.
        head_half = (end - begin + (step + pairs) % 2) // 2 if self._halved else end - begin
        half = self.block // 2 if self._halved else self.block
        k, here = np.arange(self.block), (end - begin)[:, None]
        second = k - half + head_half[:, None]  # place of those in the second half, behind those of the first
        place = np.where(k < head_half[:, None], k, np.where((k >= half) & (second < here), second, -1))
        there = (place >= 0) & (counts[:, None] > 0)
        place = np.where(place < 0, k % np.maximum(here, 1), place)  # padding repeats triples of the block
        source = self._offsets[pairs, None] + (begin[:, None] + place) % np.maximum(counts[:, None], 1)
        return np.where(counts[:, None] > 0, self._order(epoch)[source % len(self.partition)], -1), there

    def _present(self, step: int) -> int:
        part = step % self._steps
        return int((self._counts * (part + 1) // self._steps - self._counts * part // self._steps).sum())

    def _shuffled(self, epoch: int) -> Int64:
        ends = np.append(self._offsets, len(self.partition))
        return shuffled_segments(ends, stream_key(self.seed, _RIGID_STREAM, epoch))


_RANDOM_STREAM = 0xD4A3  # of the sampler's seed


class RandomSampler(ShardedSampler):
    """Triples drawn with replacement, the same number from every non-empty shardpair.

    To keep the expected loss the mean over all triples for any n, a triple's weight is multiplied by its pair's share
    of the triples over its share of the draws. Arguments as of `ShardedSampler`.
    """

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.partition) // (self._drawn_pairs * self.block))

    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        keys = derived_keys(stream_key(self.seed, _RANDOM_STREAM, step), pairs)
        first, count = self._offsets[pairs], self._counts[pairs]
        drawn = draw_between(keys, first[:, None], count[:, None], self.block)[:, 0]
        full = np.broadcast_to(count[:, None] > 0, drawn.shape)
        return np.where(full, drawn, -1), full.copy()

    def _present(self, step: int) -> int:
        return self._drawn_pairs * self.block

    def _pair_weights(self) -> Float32:
        return (self._counts * (self._drawn_pairs / len(self.partition))).astype(np.float32)

    @cached_property
    def _drawn_pairs(self) -> int:
        return int(np.count_nonzero(self._counts))


def frequency_weights(triples: Int32) -> Float32:
    """The weights `1 / sqrt(count(head, relation) + count(relation, tail))`, scaled to a mean of 1.

    Counts are over all triples by global id, so weights do not depend on the number of shards. As in word2vec's
    subsampling and the code of Sun et al., "RotatE", ICLR 2019.

    Args:
        triples: int `[N, 3]`, global ids: all training triples.

    Returns:
        float32 `[N]`.
    """
    if not len(triples):
        return np.empty(0, np.float32)
    shared = _count_of_pair(triples[:, 0], triples[:, 1]) + _count_of_pair(triples[:, 2], triples[:, 1])
    weights = 1.0 / np.sqrt(shared)
    return np.asarray(weights / weights.mean(), np.float32)


def _count_of_pair(entity: npt.NDArray[np.integer], relation: npt.NDArray[np.integer]) -> Int64:
    """int64 `[N]`: number of triples with the same pair."""
    key = entity.astype(np.int64) * (int(relation.max()) + 1) + relation
    _, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
    return counts[pair]


# Candidates


_STREAM, _TYPE_STREAM = 0x4E47, 0x7E9E  # of a sampler's seed: candidates; which of an entity's types


class RandomNegatives:
    """Entities of each shard, drawn uniformly with replacement.

    Every pair of shard and worker has a key of its own, so that any worker can repeat another's draws.

    Args:
        count: Candidates from each shard, m: for each triple, or (shared) for all triples of the step.
        corruption: Which end they replace; see `batch.CORRUPTIONS`.
        shared: All triples of a step are scored with the same candidates.
        known: The true triples: candidates that make one are masked. None: they count.
        total: Candidates of a triple from all shards together, if fewer than n * m: shards in turn then draw one
            fewer, and their last candidate is padding. None: all count.

    Raises:
        BadInput: arguments that do not fit together.
    """

    _pads = False  # whether any candidate may be padding
    _masks_own = False  # whether a triple's own answer is masked where no triples are known

    def __init__(
        self,
        sharding: Sharding,
        count: int,
        *,
        corruption: Corruption = "ht",
        shared: bool = False,
        seed: int = 0,
        known: KnownTriples | None = None,
        total: int | None = None,
    ) -> None:
        if count < 1:
            raise BadInput(f"candidates: at least 1 from each shard, got {count}")
        if corruption not in CORRUPTIONS:
            raise BadInput(f"corruption {corruption!r}: known are {', '.join(CORRUPTIONS)}")
        self._surplus = 0 if total is None else count * sharding.shards - total
        if not 0 <= self._surplus < sharding.shards:
            raise BadInput(f"{total} candidates from {sharding.shards} shards are not {count} from each, or one fewer")
        self.sharding, self.count, self.corruption, self.shared = sharding, count, corruption, shared
        self.seed, self._known = seed, known

    def draw(self, step: StepTriples, worker: int) -> Negatives:
        """One worker's part of a step's candidates."""
        every, here = np.arange(self.sharding.shards), np.full(self.sharding.shards, worker)
        rows, valid = self._drawn(step, here, every)
        mask = None
        if self._pads or self._surplus or self._known is not None or self._masks_own:
            drawn, there = (rows, valid) if len(every) == 1 else self._drawn(step, every, here)
            entities = self.sharding.entity_at[every[:, None, None], drawn]
            mask = self._mask(entities if there is None else np.where(there, entities, -1), step, worker)
        return Negatives(rows, not self.shared, self.corruption, mask)

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        """Candidates of k pairs of shard and worker.

        Args:
            keys: uint64 `[k]`: keys of the pairs' random numbers.
            shards, workers: int64 `[k]`.

        Returns:
            int32 `[k, B, m]`, rows of the shards; bool `[k, B, m]`, False at padding, or None if no step has padding.
        """
        sets = len(self.corruption) if self.shared else self.sharding.shards * step.block
        count = self.sharding.counts[shards][:, None]
        drawn = draw_between(keys, np.zeros_like(count), count, sets * self.count)
        return drawn.reshape(len(keys), sets, self.count), None

    def _drawn(self, step: StepTriples, shards: Int64, workers: Int64) -> tuple[Int32, Bools | None]:
        """`_draw` with keys and surplus; what triples share is drawn once."""
        key, n = stream_key(self.seed, _STREAM, step.step), self.sharding.shards
        draws = np.zeros_like(workers) if self.shared else workers
        rows, valid = self._draw(derived_keys(key, shards * n + draws), shards, workers, step)
        if not self._surplus:
            return rows, valid
        counts = np.ones(rows.shape, np.bool_)
        counts[(shards + step.step) % n < self._surplus, :, -1] = False
        return rows, counts if valid is None else valid & counts

    def _mask(self, entities: Int64, step: StepTriples, worker: int) -> Bools:
        """Which candidates count for a worker's triples.

        Args:
            entities: int64 `[n, B, m]`, global ids of every shard's candidates; -1 at padding.

        Returns:
            bool `[n * p, n, m]`, or `[1, n, m]` if it is the same for all triples.
        """
        shards, sets, count = entities.shape
        flat = np.ascontiguousarray(entities.transpose(1, 0, 2)).reshape(sets, shards * count)
        excludes = self._known is not None or self._masks_own
        if not excludes and sets == 1:
            return (flat >= 0).reshape(1, shards, count)
        triples, _ = step.of(worker)
        mask = np.empty((len(triples), flat.shape[1]), np.bool_)
        for part in asked_sides(self.corruption, shards, step.block):
            of = np.full(len(part.triples), part.place) if self.shared else part.triples
            mask[part.triples] = flat[of] >= 0
            if not excludes:
                continue
            answers, first, last = self._true_answers(part.side, triples[part.triples])
            few = (last - first <= flat.shape[1]) & self.shared  # shorter than the candidates: they are searched for
            if few.any():
                column = np.argsort(flat[part.place], kind="stable")
                _mask_shared(flat[part.place][column], column, part.triples[few], answers, first[few], last[few], mask)
            _mask_answers(flat, of[~few], part.triples[~few], answers, first[~few], last[~few], mask)
        return mask.reshape(len(mask), shards, count)

    def _true_answers(self, side: Side, triples: Int32) -> tuple[Int32, Int64, Int64]:
        """What is masked for `triples` (int32 `[q, 3]`).

        Returns:
            int32 `[a]`, ascending for each triple; int64 `[q]`, `[q]`: where each triple's begin and end.
        """
        given, answer = (triples[:, 2], triples[:, 0]) if side == "head" else (triples[:, 0], triples[:, 2])
        if self._known is None:
            first = np.arange(len(triples))
            return np.ascontiguousarray(answer), first, first + (answer >= 0)
        lists = self._known.lists(side)
        return (lists.answers, *lists.spans(given, triples[:, 1]))


@kernel
def _mask_answers(
    entities: Int64, of: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools
) -> None:
    """`mask[which[i], c]` is False if `entities[of[i], c]` is one of `answers[first[i]:last[i]]`, which ascend."""
    for i in range(len(which)):
        if first[i] == last[i]:
            continue
        for c in range(entities.shape[1]):
            low, high, wanted = first[i], last[i], entities[of[i], c]
            while low < high:
                middle = (low + high) >> 1
                if answers[middle] < wanted:
                    low = middle + 1
                else:
                    high = middle
            if low < last[i] and answers[low] == wanted:
                mask[which[i], c] = False


@kernel
def _mask_shared(
    entities: Int64, column: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools
) -> None:
    """As `_mask_answers`, of candidates that all these triples share; they ascend: `entities[k]` is `column[k]`."""
    for i in range(len(which)):
        for a in range(first[i], last[i]):
            place = np.searchsorted(entities, answers[a])
            while place < len(entities) and entities[place] == answers[a]:  # a candidate may be drawn twice
                mask[which[i], column[place]] = False
                place += 1


class TypedNegatives(RandomNegatives):
    """Entities of the replaced entity's type, drawn uniformly with replacement, for each triple.

    If a shard has no entity of the type, its candidates are padding and masked. For a triple whose replaced entity has
    several types, one of them is drawn first.

    Args:
        sharding, count: As of `RandomNegatives`.
        further_types: int `[K, 2]`: entity and type, besides the types of the sharding; None: each entity has one.
        settings: Further arguments of `RandomNegatives`, but for `shared`.

    Raises:
        BadInput: as `RandomNegatives`; an entity or a type that does not exist.
    """

    def __init__(self, sharding: Sharding, count: int, *, further_types: Int32 | None = None, **settings: Any) -> None:
        super().__init__(sharding, count, **settings)
        if self.shared:
            raise BadInput(
                "candidates of the type of what they replace are drawn for each triple; they cannot be shared"
            )
        entities, kind_of = sharding.entities, sharding.entity_types.astype(np.int64)
        more = np.asarray(np.empty((0, 2)) if further_types is None else further_types, np.int64).reshape(-1, 2)
        if more.size and (more.min() < 0 or more[:, 0].max() >= entities):
            raise BadInput(f"types of entities outside 0 .. {entities - 1}, or below 0")
        first = np.stack([np.arange(entities), kind_of], axis=1)
        entity, kind = np.unique(np.concatenate([first, more]), axis=0).T  # by entity, then type
        # The types of entity e are `types[ends[e]:ends[e + 1]]`.
        self._types: Int64 = kind
        self._ends = np.searchsorted(entity, np.arange(entities + 1))
        # The rows of type t on shard s are `rows[bounds[s, t]:bounds[s, t + 1]]`, one more than there are at the end.
        shard, row, kinds = sharding.shard_of[entity].astype(np.int64), sharding.row_of[entity], int(kind.max()) + 1
        order, places = np.lexsort((row, kind, shard)), np.arange(sharding.shards)[:, None] * kinds
        self._rows = np.append(row[order], 0).astype(np.int32)
        group = (shard * kinds + kind)[order]
        self._bounds = np.searchsorted(group, places + np.arange(kinds + 1))
        self._pads = bool((np.diff(self._bounds, axis=1) == 0).any())

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        kinds, shard = np.stack([self._asked_types(step, int(worker)) for worker in workers]), shards[:, None]
        first = self._bounds[shard, kinds]
        count = self._bounds[shard, kinds + 1] - first
        rows = self._rows[draw_between(keys, first, count, self.count)]
        return rows, np.broadcast_to(count[..., None] > 0, rows.shape) if self._pads else None

    def _asked_types(self, step: StepTriples, worker: int) -> Int64:
        """int64 `[n * p]`: a type of the entity that each triple's candidates replace; any type at padding."""
        triples, _ = step.of(worker)
        replaced = np.empty(len(triples), np.int64)
        for part in asked_sides(self.corruption, self.sharding.shards, step.block):
            replaced[part.triples] = triples[part.triples, 0 if part.side == "head" else 2]
        first = self._ends[replaced]
        count = np.where(replaced < 0, 0, self._ends[replaced + 1] - first)
        key = derived_keys(stream_key(self.seed, _TYPE_STREAM, step.step), np.array([worker]))
        return self._types[draw_between(key, first[None], count[None], 1)[0, :, 0]]


class AugmentedNegatives(RandomNegatives):
    """Random candidates for tails, shared by the step's triples, and the tails of all its triples.

    So a triple is scored with the tail of every other triple of the step, on whichever worker that is: as many as
    without shards. Its own answer does not count, nor does padding; with `known`, no true answer does.

    Args:
        sharding, count: As of `RandomNegatives`.
        settings: Its `seed`, `known` and `total`.
    """

    _pads = _masks_own = True

    def __init__(self, sharding: Sharding, count: int, **settings: Any) -> None:
        super().__init__(sharding, count, corruption="t", shared=True, **settings)

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
        tails = np.concatenate([triples[block, 2] for triples, _ in found])
        source = np.concatenate([source[block] for _, source in found])
        first = np.zeros(len(source), np.bool_)
        first[np.unique(source, return_index=True)[1]] = True  # padding repeats a triple
        there = (source >= 0) & first
        return np.where(there, self.sharding.row_of[np.maximum(tails, 0)], 0).astype(np.int32), there
