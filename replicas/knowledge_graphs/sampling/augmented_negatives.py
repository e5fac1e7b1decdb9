"""Random candidates together with the tails of the step's other triples (bess-kge's `augment_negative`)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt64
from elastable.replicas.knowledge_graphs.graph import KnownTriples, Sharding
from elastable.replicas.knowledge_graphs.sampling.negatives import StepTriples
from elastable.replicas.knowledge_graphs.sampling.random_negatives import RandomNegatives

__all__ = ["AugmentedNegatives"]


class AugmentedNegatives(RandomNegatives):
    """Random candidates for tails, shared by the step's triples, and the tails of all its triples.

    So a triple is scored with the tail of every other triple of the step, on whichever worker that is: as many as
    without shards. Its own answer does not count, nor does padding; with `known`, no true answer does.

    Args:
        sharding, count, seed, total, tell_entities: As of `NegativeSampler`.
        known: The true triples, to mask them; None: only a triple's own answer is masked.
    """

    def __init__(
        self,
        sharding: Sharding,
        count: int,
        *,
        seed: int = 0,
        known: KnownTriples | None = None,
        tell_entities: bool = False,
        total: int | None = None,
    ) -> None:
        super().__init__(
            sharding,
            count,
            corruption="t",
            shared=True,
            seed=seed,
            exclude="answer" if known is None else "known",
            known=known,
            tell_entities=tell_entities,
            total=total,
        )

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
