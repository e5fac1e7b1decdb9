"""One worker's part of one step, from samplers to schemes, array by array.

Letters: n workers (and as many shards), p triples of each shardpair (shard of
the head, shard of the tail) in a step, so that a worker scores `n * p` triples; m candidates from each shard.

A worker's triples are those whose head is on its shard, in n blocks of p: block j holds those whose tail is on shard j.
"Triple b of a worker" counts through the blocks, `b = j * p + k`. Worker and shard are the same number.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int32, Int64

Corruption = Literal["h", "t", "ht"]
Side = Literal["head", "tail"]

SIDES: tuple[Side, ...] = ("head", "tail")
"""Ends of a triple."""

CORRUPTIONS: tuple[Corruption, ...] = ("h", "t", "ht")
"""Which end of a triple the candidates replace: its head, its tail, or (`ht`) the head for positions
`k < p // 2` of every block and the tail for the others; p is even then."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker's triples whose candidates replace the same end.

    Attributes:
        triples: int64 `[q]`: indices of the worker's triples, ascending.
        place: Index of the side among shared candidates: 1 for tails in corruption "ht", else 0.
    """

    side: Side
    triples: Int64
    place: int


def asked_sides(corruption: Corruption, blocks: int, each: int) -> tuple[Asked, ...]:
    """The queried ends of `blocks` blocks of `each` triples, as `CORRUPTIONS` says."""
    order = np.arange(blocks * each)
    if corruption != "ht":
        return (Asked("head" if corruption == "h" else "tail", order, 0),)
    first = order % each < each // 2
    return Asked("head", order[first], 0), Asked("tail", order[~first], 1)


@dataclass(frozen=True)
class Negatives:
    """Candidates of one worker's step: the rows that it reads, and how triples are scored with them.

    Attributes:
        rows: int32 `[n, B, m]`, rows of this worker's shard. `rows[j]` are for the triples of worker j:
            embedding-moving sends their embeddings to j in the all-to-all, and reads those of shard s at `[s, B, m]`;
            score-moving scores the triples of j with them here. Padding candidates read some existing row.
        per_triple: True: `B = n * p`, and triple b is scored with `[s, b, :]` of every shard s. False (shared): `B =
            1`, or 2 for corruption "ht" (0: heads, 1: tails), and every triple of the step is scored with all
            candidates of its end (in corruption "ht" each block has a half for each end). All `rows[j]` are equal then.
        mask: bool `[n * p, n, m]`, or `[1, n, m]` if it is the same for all triples, or None if every candidate counts
            in every step. `mask[b, s, k]` is False if candidate k of shard s does not count for triple b: it is
            padding, or makes a known triple and is filtered.
    """

    rows: Int32
    per_triple: bool
    corruption: Corruption
    mask: Bools | None = None


@dataclass(frozen=True)
class StepBatch:
    """One worker's part of one training step. Shapes are the same on every worker and in every step.

    Attributes:
        step: Number of the step in the run, from 0; it determines the batch, given the sampler's settings.
        head: int32 `[n, p]`, rows of this worker's shard: the heads of its triples, block by block.
        relation: int32 `[n, p]`: the relations of its triples.
        tail: int32 `[n, p]`, rows of this worker's shard: `tail[j]` are the tails of worker j's block `worker`. An
            all-to-all of their embeddings gives each worker the tails of its triples, block by block.
        triple: int64 `[n, p]`: positions of its triples in `PartitionedTriples.triples`;
            -1 in blocks of an empty shardpair, whose rows and relations are 0.
        mask: bool `[n, p]`: False at padding, which repeats a triple of its block, if any.
        weight: float32 `[n, p]`: weights of its triples, 0 at padding. Their mean over
            all training triples is 1 and does not depend on n. The loss of a step
            is the weighted sum over all workers' triples, divided by `present`.
        present: Unmasked triples of all workers in this step.
        negatives: The candidates; None if the sampler draws none.
    """

    step: int
    worker: int
    head: Int32
    relation: Int32
    tail: Int32
    triple: Int64
    mask: Bools
    weight: Float32
    present: int
    negatives: Negatives | None = None

    @property
    def gathered_rows(self) -> int:
        """Number of rows of its shard that the worker reads in this step; the same on every worker."""
        drawn = 0 if self.negatives is None else self.negatives.rows.size
        return self.head.size + self.tail.size + drawn


@dataclass(frozen=True)
class Queries:
    """One worker's part of a batch of queries (head, relation, ?) or (?, relation, tail).

    A query belongs to the worker that owns the given entity; every worker has q of them in every batch.

    Attributes:
        side: The queried end.
        row: int32 `[q]`: row of the given entity in this worker's shard.
        given: int64 `[q]`: its global id.
        relation: int32 `[q]`.
        answer: int64 `[q]`: global id of the true answer; -1 at padding, or if none is known.
        triple: int64 `[q]`: position of the triple in the input array; -1 at padding.
        mask: bool `[q]`: False at padding, whose rows and relations are 0.
    """

    side: Side
    row: Int32
    given: Int64
    relation: Int32
    answer: Int64
    triple: Int64
    mask: Bools
