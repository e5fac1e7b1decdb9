"""Frequency weights: smaller for triples whose (head, relation) or (relation, tail) is common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64
from elastable.embedding_store.errors import BadInput

__all__ = ["frequency_weights"]


def frequency_weights(triples: Int32, smoothing: float = 0.0) -> Float32:
    """The weights `1 / sqrt(count(head, relation) + count(relation, tail) + smoothing)`, scaled to a mean of 1.

    Counts are over all triples by global id, so weights do not depend on the number of shards. As in word2vec's
    subsampling and the code of Sun et al., "RotatE", ICLR 2019.

    Args:
        triples: int `[N, 3]`, global ids: all training triples.
        smoothing: At least 0; larger values make weights more equal.

    Returns:
        float32 `[N]`.

    Raises:
        BadInput: a negative smoothing.
    """
    if not smoothing >= 0.0 or np.isinf(smoothing):
        raise BadInput(f"weight smoothing must be a number from 0, got {smoothing}")
    if not len(triples):
        return np.empty(0, np.float32)
    shared = _count_of_pair(triples[:, 0], triples[:, 1]) + _count_of_pair(triples[:, 2], triples[:, 1])
    weights = 1.0 / np.sqrt(shared + smoothing)
    return np.asarray(weights / weights.mean(), np.float32)


def _count_of_pair(entity: npt.NDArray[np.integer], relation: npt.NDArray[np.integer]) -> Int64:
    """int64 `[N]`: number of triples with the same pair."""
    key = entity.astype(np.int64) * (int(relation.max()) + 1) + relation
    _, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
    return counts[pair]
