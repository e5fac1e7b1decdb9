"""What the samplers give and the schemes take: one worker's part of one step, array by array.

Letters: n workers (and as many shards), p triples of each pair of shards in a
step, so that a worker scores `n * p` triples; m candidates from each shard.

A worker's triples are those whose head lies on its shard, in n blocks of p:
block j holds those whose tail lies on shard j. "Triple b of a worker" counts
through the blocks, `b = j * p + k`. Worker and shard are the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64

__all__ = [
    "CORRUPTIONS",
    "SIDES",
    "Bools",
    "Corruption",
    "Int32",
    "Negatives",
    "Queries",
    "Side",
    "StepBatch",
    "UInt64",
]

Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

Corruption = Literal["h", "t", "ht"]
Side = Literal["head", "tail"]

SIDES: tuple[Side, ...] = ("head", "tail")
"""Ends of a triple."""

CORRUPTIONS: tuple[Corruption, ...] = ("h", "t", "ht")
"""Which end of a triple the candidates replace: its head, its tail, or (`ht`) the head for positions
`k < p // 2` of every block and the tail for the others; p is even then."""


@dataclass(frozen=True)
class Negatives:
    """Candidates of one worker's step: what it reads from its own shard, and how its triples use what comes.

    Attributes:
        rows: int32 `[n, B, m]`, rows of this worker's own shard. `rows[j]` are
            meant for the triples of worker j: in the embedding-moving scheme
            their embeddings are what goes to j in the all-to-all, and what
            comes from shard s is read at `[s, B, m]`; in the score-moving
            scheme the triples of j are scored with them here. Where `local`,
            nothing is exchanged: `rows[j]`, for every j, is for this worker's
            own triples. Padding candidates read a row that exists.
        per_triple: True: `B = n * p`, and triple b is scored with
            `[s, b, :]` of every shard s. False (shared): `B = 1`, or 2 for
            corruption "ht" (0: heads, 1: tails), and every triple of a worker is
            scored with all of its end's (the n blocks of corruption "ht" have a half for
            each end); the score-moving scheme may score
            everyone's triples with everyone's candidates, n times as many.
        corruption: See `CORRUPTIONS`.
        local: See `rows`.
        common: A shard's candidates are the same for all workers' triples, so `rows[j]` is
            the same for every j (shared; the score-moving scheme scores everyone's
            triples with them once). Where they are all rows of the shard, in
            their order, B is 1 for every corruption.
        mask: bool `[n * p, n, m]`, or `[1, n, m]` where it is the same for all triples,
            or None where every candidate counts (then in every step).
            `mask[b, s, k]` is False where candidate k of shard s (with `local`:
            `rows[s]`) is not to count for this worker's triple b: it is padding,
            or, where true negatives are filtered, makes a triple that is known.
        entities: int64 `[B, n, m]`, global ids of the candidates of this worker's
            triples, -1 for padding; None unless the sampler was told to
            give them.
        column: int32 `[B, n, m]`: for listed candidates, where each stood in the
            list of its triple (or in the one list), -1 at padding; else None.
        mask_of_all: bool `[n * p, n, n, m]` (or `[1, n, n, m]`), by `[b, s, j, k]`: as `mask`, for the
            candidates that shard s drew for worker j's triples: for shared
            candidates that everyone's triples are scored with. None unless
            the sampler was told to give it, or where every candidate counts.
    """

    rows: Int32
    per_triple: bool
    corruption: Corruption
    local: bool = False
    common: bool = False
    mask: Bools | None = None
    entities: Int64 | None = None
    column: Int32 | None = None
    mask_of_all: Bools | None = None


@dataclass(frozen=True)
class StepBatch:
    """One worker's part of one training step. Shapes are the same on every worker and in every step.

    Attributes:
        step: Which step of the run this is, from 0; with the settings of its
            sampler it says everything about the batch.
        worker: Whose part.
        head: int32 `[n, p]`, rows of this worker's own shard: the heads of its
            own triples, block by block.
        relation: int32 `[n, p]`: the relations of its own triples.
        tail: int32 `[n, p]`, rows of this worker's own shard: `tail[j]` are the
            tails of worker j's block `worker`. An all-to-all of their embeddings
            brings each worker the tails of its own triples, block by block.
        triple: int64 `[n, p]`: where its own triples stand in
            `PartitionedTriples.triples`; -1 in blocks of an empty shardpair, whose
            rows and relations are 0.
        mask: bool `[n, p]`: False at padding, which stands in for a triple so that
            shapes stay the same; it repeats a triple of its block, if there is one.
        weight: float32 `[n, p]`: of its own triples, 0 at padding. The mean over all
            training triples is 1; what a triple weighs does not depend on n.
            The loss of a step is the weighted sum of all workers' triples, divided by
            the step's number of unmasked triples over all workers (or by
            their weights' sum).
        present: unmasked triples of all workers in this step.
        negatives: Their candidates; None where the sampler draws none.
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
        """How many rows of its shard the worker reads in this step: the same on every worker."""
        drawn = 0 if self.negatives is None else self.negatives.rows.size
        return self.head.size + self.tail.size + drawn


@dataclass(frozen=True)
class Queries:
    """One worker's part of a batch of queries (head, relation, ?) or (?, relation, tail).

    Queries lie with the worker that owns the entity that is given; every worker
    has q of them in every batch.

    Attributes:
        side: Which end is asked for.
        row: int32 `[q]`: row of this worker's own shard, of the entity that is given.
        given: int64 `[q]`: its global id.
        relation: int32 `[q]`.
        answer: int64 `[q]`: global id of the true answer; -1 at padding, and where none is known.
        triple: int64 `[q]`: place of the triple in the array that was handed in;
            -1 at padding.
        mask: bool `[q]`: False at padding, whose rows and relations are 0.
    """

    side: Side
    row: Int32
    given: Int64
    relation: Int32
    answer: Int64
    triple: Int64
    mask: Bools
