"""The nearest neighbours of entities, by their embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.evaluation.candidates import Candidates
from elastable.replicas.knowledge_graphs.scores.row_layouts import compared_columns
from elastable.replicas.knowledge_graphs.trained.trained_graph import TrainedGraph

__all__ = ["MEASURES", "Neighbors", "nearest_neighbors"]

MEASURES = ("cosine", "euclidean", "dot")
"""Similarities; "euclidean" is minus the distance, so that higher is always nearer."""

_WINDOW_VALUES = 1 << 22  # similarities held at once: 16 MiB


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The nearest entities of each of q, nearest first.

    Attributes:
        entities: int64 `[q, k]`, global ids.
        similarities: float32 `[q, k]`.
    """

    entities: Int64
    similarities: Float32


def nearest_neighbors(
    trained: TrainedGraph,
    entities: npt.ArrayLike,
    k: int = 10,
    measure: str = "cosine",
    among: Candidates | None = None,
) -> Neighbors:
    """The nearest entities to each of some, without itself; ties go to the lower id.

    Embeddings are compared as they are trained, without what is not a position (the bias of ConvE): see
    `scores.row_layouts`.

    Args:
        trained: The model.
        entities: int `[q]`, global ids.
        k: Number of neighbours of each; fewer if there are not as many. Where one entity has fewer than another, the
            rest of its row has similarity -inf.
        measure: One of `MEASURES`.
        among: The entities that may be neighbours; all by default.

    Raises:
        BadInput: k below 1, an unknown measure, or no entity left.
        IdOutOfRange: an entity does not exist.
    """
    if measure not in MEASURES:
        raise BadInput(f"neighbours by {measure!r}: known are {', '.join(MEASURES)}")
    ids, count = np.asarray(entities, np.int64).reshape(-1), len(trained.entities)
    if len(ids) and not 0 <= ids.min() <= ids.max() < count:
        raise IdOutOfRange(f"entities are in {ids.min()} .. {ids.max()}; there are {count}")
    others = np.arange(count) if among is None or among.entities is None else among.entities
    left = min(k, len(others) - bool(len(ids) and np.isin(ids, others).all()))
    if left < 1:
        raise BadInput(f"{k} neighbours among {len(others)} entities: there is nobody else, or k is below 1")
    columns = compared_columns(trained.model.score)
    table = _ready(trained.embeddings(others)[:, columns], measure)
    own = _ready(trained.embeddings(ids)[:, columns], measure)
    found, similarities = np.empty((len(ids), left), np.int64), np.empty((len(ids), left), np.float32)
    rows = max(1, _WINDOW_VALUES // max(1, len(others)))
    for first in range(0, len(ids), rows):
        some = slice(first, first + rows)
        near = _similarities(own[some], table, measure)
        near[ids[some, None] == others[None]] = -np.inf
        order = _best(near, left)
        found[some], similarities[some] = others[order], np.take_along_axis(near, order, axis=1)
    return Neighbors(found, similarities)


def _ready(rows: Float32, measure: str) -> Float32:
    if measure == "euclidean":  # differences of squares, which in float32 would hide small distances
        return cast(Float32, rows.astype(np.float64))
    if measure != "cosine":
        return np.ascontiguousarray(rows)
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12), np.float32)


def _similarities(own: Float32, table: Float32, measure: str) -> Float32:
    product = own @ table.T
    if measure != "euclidean":
        return np.asarray(product, np.float32)
    squares = np.square(own).sum(axis=1)[:, None] - 2 * product + np.square(table).sum(axis=1)[None]
    return np.asarray(-np.sqrt(np.maximum(squares, 0)), np.float32)


def _best(near: Float32, k: int) -> Int64:
    """int64 `[q, k]`: columns of the highest, highest first; of equals, the first."""
    if k < near.shape[1]:
        least = -np.partition(-near, k - 1, axis=1)[:, k - 1 : k]
        near = np.where(near >= least, near, -np.inf)
    return np.asarray(np.argsort(-near, axis=1, kind="stable")[:, :k], np.int64)
