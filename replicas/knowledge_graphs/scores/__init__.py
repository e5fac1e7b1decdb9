"""Score functions of knowledge-graph embeddings, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.scores.bilinear import ComplEx, DistMult
from elastable.replicas.knowledge_graphs.scores.boxe import BoxE
from elastable.replicas.knowledge_graphs.scores.conve import ConvE
from elastable.replicas.knowledge_graphs.scores.factored import CP, TuckER
from elastable.replicas.knowledge_graphs.scores.function import ScoreFunction
from elastable.replicas.knowledge_graphs.scores.interacting import InterHT, TranS
from elastable.replicas.knowledge_graphs.scores.paired import PairRE, TripleRE
from elastable.replicas.knowledge_graphs.scores.translation import RotatE, TransE

__all__ = ["SCORES", "score_function"]


_DISTANCES = (TransE, RotatE, PairRE, TripleRE, BoxE, InterHT, TranS)
_PRODUCTS = (DistMult, ComplEx, ConvE, CP, TuckER)

SCORES: Mapping[str, type[ScoreFunction]] = MappingProxyType({maker.name: maker for maker in (*_DISTANCES, *_PRODUCTS)})
"""All score functions."""

_WITHOUT_NORM = {RotatE.name: "its distance is always the sum of the moduli of the complex differences"}
_PRODUCT = "its score is a product and not a distance"


def score_function(name: str, dim: int, norm: int | None = None, seed: int = 0) -> ScoreFunction:
    """A score function.

    Args:
        name: One of `SCORES`, in upper or lower case.
        dim: float32 values of an entity's embedding; of one part, if entities have two
            (BoxE, InterHT, TranS, CP), and without the bias (ConvE).
        norm: 1 or 2, for distances by a norm; None: the function's default.
        seed: Seed of further variables, where the function has any (ConvE, TuckER).

    Raises:
        BadInput: an unknown name, an invalid dim or norm, or a norm of a score that has none.
    """
    maker = {known.lower(): found for known, found in SCORES.items()}.get(name.lower())
    if maker is None:
        raise BadInput(f"score function {name!r}: known are {', '.join(SCORES)}")
    if dim < 1:
        raise BadInput(f"{maker.name} of dim {dim}: dim must be at least 1")
    chosen: dict[str, int] = {} if norm is None else {"norm": norm}
    if chosen and not maker.norms:
        raise BadInput(f"norm {norm} of {maker.name}: {_WITHOUT_NORM.get(maker.name, _PRODUCT)}; leave the norm out")
    if maker in (ConvE, TuckER):
        chosen["seed"] = seed
    return cast(Callable[..., ScoreFunction], maker)(dim, **chosen)
