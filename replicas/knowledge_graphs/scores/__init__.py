"""Score functions of knowledge-graph embeddings, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.scores.bilinear import ComplEx, DistMult
from elastable.replicas.knowledge_graphs.scores.boxe import BoxE
from elastable.replicas.knowledge_graphs.scores.conve import ConvE
from elastable.replicas.knowledge_graphs.scores.function import ScoreFunction
from elastable.replicas.knowledge_graphs.scores.interacting import InterHT, TranS
from elastable.replicas.knowledge_graphs.scores.paired import PairRE, TripleRE
from elastable.replicas.knowledge_graphs.scores.translation import RotatE, TransE

__all__ = ["SCORES", "score_function"]


class _Maker(Protocol):
    name: str

    def __call__(self, dim: int, norm: int = ...) -> ScoreFunction: ...


SCORES: Mapping[str, _Maker] = MappingProxyType(
    {maker.name: maker for maker in (TransE, RotatE, DistMult, ComplEx, PairRE, TripleRE, BoxE, InterHT, TranS, ConvE)}
)
"""All score functions."""


def score_function(name: str, dim: int, norm: int | None = None) -> ScoreFunction:
    """A score function.

    Args:
        name: One of `SCORES`, in upper or lower case.
        dim: float32 values of an entity's embedding; of one part, if entities have two
            (BoxE, InterHT, TranS), and without the bias (ConvE).
        norm: 1 or 2, for distances; None: the function's default.

    Raises:
        BadInput: an unknown name, or an invalid dim or norm.
    """
    maker = {known.lower(): found for known, found in SCORES.items()}.get(name.lower())
    if maker is None:
        raise BadInput(f"score function {name!r}: known are {', '.join(SCORES)}")
    if dim < 1:
        raise BadInput(f"{maker.name} of dim {dim}: dim must be at least 1")
    return maker(dim) if norm is None else maker(dim, norm)
