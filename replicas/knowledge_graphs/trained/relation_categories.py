"""Categories of relations by how many tails a head has, and heads a tail: 1-1, 1-N, N-1, N-N."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int32

__all__ = ["CATEGORIES", "relation_categories"]

CATEGORIES = ("1-1", "1-N", "N-1", "N-N")
"""Heads of a tail, then tails of a head: in "1-N" one head has many tails."""

_MANY = 1.5


def relation_categories(triples: npt.ArrayLike, relations: int) -> Int32:
    """The category of every relation, as Bordes et al. (2013) draw the line.

    A side counts as "N" if the average number of its entities, over the distinct pairs of relation and other end, is
    at least 1.5.

    Args:
        triples: int `[N, 3]`, usually those of training; repeated ones count once.
        relations: Number of relations, R.

    Returns:
        int32 `[R]`: index in `CATEGORIES`; -1 for a relation without triples.
    """
    unique = np.unique(np.asarray(triples).reshape(-1, 3), axis=0).astype(np.int64)
    count = np.bincount(unique[:, 1], minlength=relations)
    many = []
    for end in (2, 0):  # heads of a tail, tails of a head
        pairs = np.unique(unique[:, [1, end]], axis=0)
        distinct = np.bincount(pairs[:, 0], minlength=relations)
        many.append(count >= _MANY * np.maximum(distinct, 1))
    found = 2 * many[0] + many[1]
    return np.where(count > 0, found, -1).astype(np.int32)
