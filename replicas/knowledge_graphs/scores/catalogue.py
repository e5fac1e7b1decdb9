"""Score functions by name, and what the columns of an entity's and of a relation's row are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.scores.conve import ConvE
from elastable.replicas.knowledge_graphs.scores.functions import (
    CP,
    BoxE,
    ComplEx,
    DistMult,
    InterHT,
    PairRE,
    RotatE,
    ScoreFunction,
    TranS,
    TransE,
    TripleRE,
    TuckER,
)

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


@dataclass(frozen=True, slots=True)
class RowPart:
    """Columns `first .. last - 1` of a row.

    Attributes:
        name: Name of the part.
        first, last: Its columns.
        meaning: How the score uses them, where that is not plain.
    """

    name: str
    first: int
    last: int
    meaning: str = ""


_UNIT = "divided by its length before it is used"
_ELU = "stored as x, used as elu(x) + 1"
_PLUS_ONE = "used with 1 added"

# Of each score: entity parts, relation parts; (name, meaning). All parts of a row are of one width, but a bias is 1.
_Parts = tuple[tuple[str, str], ...]
_COMPLEX: _Parts = (("real", ""), ("imaginary", ""))
_PLAIN: _Parts = (("embedding", ""),)
_LAYOUTS: dict[str, tuple[_Parts, _Parts]] = {
    "TransE": (_PLAIN, (("translation", ""),)),
    "RotatE": (_COMPLEX, (("phase", "an angle in radians: r = exp(i phase)"),)),
    "DistMult": (_PLAIN, (("diagonal", ""),)),
    "ComplEx": (_COMPLEX, _COMPLEX),
    "PairRE": ((("embedding", _UNIT),), (("head scale", ""), ("tail scale", ""))),
    "TripleRE": ((("embedding", _UNIT),), (("head scale", _PLUS_ONE), ("tail scale", _PLUS_ONE), ("translation", ""))),
    "InterHT": ((("embedding", _UNIT), ("aid", f"{_UNIT}, then 1 is added")), (("translation", ""),)),
    "TranS": (
        (("embedding", _UNIT), ("aid", f"{_UNIT}, then 1 is added")),
        (("head scale", ""), ("translation", ""), ("tail scale", "")),
    ),
    "BoxE": (
        (("point", ""), ("bump", "moves the point of the other end")),
        (("head middle", ""), ("head width", _ELU), ("tail middle", ""), ("tail width", _ELU)),
    ),
    "CP": ((("as head", ""), ("as tail", "")), (("diagonal", ""),)),
    "TuckER": (_PLAIN, _PLAIN),
    "ConvE": ((("embedding", ""), ("bias", "added to the score of an answer")), (("embedding", ""),)),
}


def row_layout(score: ScoreFunction) -> dict[str, tuple[RowPart, ...]]:
    """The parts of an "entity"'s and of a "relation"'s row, from the first column to the last."""
    entity, relation = _LAYOUTS[score.name]
    widths = score.entity_width, score.relation_width
    return {"entity": _parts(entity, widths[0]), "relation": _parts(relation, widths[1])}


def _parts(named: _Parts, width: int) -> tuple[RowPart, ...]:
    biases = sum(name == "bias" for name, _ in named)
    each, parts, first = (width - biases) // (len(named) - biases), [], 0
    for name, meaning in named:
        last = first + (1 if name == "bias" else each)
        parts.append(RowPart(name, first, last, meaning))
        first = last
    return tuple(parts)
