"""Kernels that mask candidates found in sorted lists of excluded answers."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph import first_at_least

__all__ = ["mask_each", "mask_rows", "mask_shared"]


def mask_shared(entities: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools) -> None:
    """`mask_each` for candidates that triples share: `entities` is int64 `[c]`."""
    column = np.argsort(entities, kind="stable")
    _mask_shared(entities[column], column, which, answers, first, last, mask)


@kernel
def mask_each(entities: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools) -> None:
    """Masks answers among the candidates of each triple.

    Args:
        entities: int64 `[b, c]`: the candidates of every triple.
        which: int64 `[q]`: the triples to mask.
        answers: int32 `[a]`.
        first, last: int64 `[q]`: triple `which[i]` excludes `answers[first[i]:last[i]]`, ascending.
        mask: bool `[b, c]`, changed in place: False for excluded candidates.
    """
    for i in range(len(which)):
        if first[i] == last[i]:
            continue
        row = which[i]
        for c in range(entities.shape[1]):
            place = first_at_least(answers, first[i], last[i], entities[row, c])
            if place < last[i] and answers[place] == entities[row, c]:
                mask[row, c] = False


@kernel
def _mask_shared(
    entities: Int64, column: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools
) -> None:
    candidates = len(entities)
    for i in range(len(which)):
        listed = last[i] - first[i]
        if listed <= candidates:  # walk the shorter of the two, search the longer
            for a in range(first[i], last[i]):
                place = first_at_least(entities, 0, candidates, answers[a])
                while place < candidates and entities[place] == answers[a]:  # a candidate may be drawn twice
                    mask[which[i], column[place]] = False
                    place += 1
        else:
            for c in range(candidates):
                place = first_at_least(answers, first[i], last[i], entities[c])
                if place < last[i] and answers[place] == entities[c]:
                    mask[which[i], column[c]] = False


@kernel
def mask_rows(column_of: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools) -> None:
    """`mask_each` where every entity is a candidate: that of column `column_of[entity]` (int64 `[E]`)."""
    for i in range(len(which)):
        for a in range(first[i], last[i]):
            mask[which[i], column_of[answers[a]]] = False
