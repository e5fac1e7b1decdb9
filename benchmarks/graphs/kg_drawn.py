"""Knowledge graphs of the sizes of FB15k-237 and CoDEx-M, drawn from a hidden model whose own MRR is the bound.

    python -m benchmarks.graphs.kg_quality drawn     # draws and trains both; ELASTABLE_BUDGET=10m shortens them

A drawn graph is not the published one: it has its sizes, and the structure of `HiddenModel`. Entities have types,
clusters within types, and popularities by Zipf's law; a relation leads from one type to another; the log-odds of a
triple are a ComplEx score, similar within a cluster, plus the popularities of both ends. A relation's triples are drawn
without replacement in proportion to their odds, and divided at random into splits. So on average nothing ranks the
validation triples better than the odds themselves do: `HiddenModel.mrr` is what a trained model is compared with.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import SPLITS, KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph.triple_files import Names

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_TYPES = 24
_CLUSTERS = 16  # of each type
_OWN = 0.15  # share of an entity's own in the variance of its hidden vector; the rest is its cluster's
_NUMBERS = 8  # complex ones of a hidden vector
_SHARPNESS = 3.0  # standard deviation of a hidden score
_ENTITY_ZIPF, _TYPE_ZIPF, _RELATION_ZIPF = 0.6, 0.6, 1.0  # exponents
_RELATION_SHIFT = 5.0  # of ranks: the largest of 237 relations has a twentieth of the triples
_FULLEST = 0.05  # share of a relation's possible triples that may be drawn


@dataclass(frozen=True, slots=True)
class DrawnSize:
    """Numbers of entities, relations (24 at least) and triples of each split."""

    entities: int
    relations: int
    train: int
    valid: int
    test: int

    @property
    def triples(self) -> int:
        """Of all splits."""
        return self.train + self.valid + self.test


DRAWN = {
    "fb15k-237-drawn": DrawnSize(14_541, 237, 272_115, 17_535, 20_466),
    "codex-m-drawn": DrawnSize(17_050, 51, 185_584, 10_310, 10_311),
}
"""The sizes of FB15k-237 and CoDEx-M."""


class HiddenModel:
    """The odds that a graph is drawn from: a function of its size and a seed.

    Attributes:
        size: The graph's.
        types: int64 `[E]`: the type of each entity.
        ends: int64 `[R, 2]`: the types of a relation's heads and tails; every type has a relation.
        popularity: float32 `[E]`: what an entity adds to the log-odds, at either end.
        entities: float32 `[E, 2 K]`: K complex numbers, real parts first. Those of a cluster of a type are alike.
        relations: float32 `[R, 2 K]`: the same, scaled so that the scores have the standard deviation `_SHARPNESS`.
    """

    def __init__(self, size: DrawnSize, seed: int) -> None:
        random, width = np.random.default_rng(seed), 2 * _NUMBERS
        self.size = size
        shares = _zipf(_TYPES, _TYPE_ZIPF, 2.0)
        self.types = random.choice(_TYPES, size.entities, p=shares).astype(np.int64)
        self.ends = random.choice(_TYPES, (size.relations, 2), p=shares).astype(np.int64)
        self.ends[random.permutation(size.relations)[:_TYPES], 0] = random.permutation(_TYPES)
        self.popularity = (-_ENTITY_ZIPF * np.log(1 + random.permutation(size.entities))).astype(np.float32)
        centres = random.standard_normal((_TYPES, _CLUSTERS, width), np.float32)
        centre = centres[self.types, random.choice(_CLUSTERS, size.entities, p=_zipf(_CLUSTERS, _TYPE_ZIPF, 2.0))]
        own = random.standard_normal((size.entities, width), np.float32)
        self.entities = np.float32(np.sqrt(1 - _OWN)) * centre + np.float32(np.sqrt(_OWN)) * own
        scale = np.float32(_SHARPNESS / np.sqrt(2 * width))
        self.relations = scale * random.standard_normal((size.relations, width), np.float32)

    def members(self, relation: int) -> tuple[Int64, Int64]:
        """The entities that may be its heads, and its tails; int64, ascending."""
        head, tail = (np.flatnonzero(self.types == kind) for kind in self.ends[relation])
        return head, tail

    def log_odds(self, relation: int, heads: Int64, tails: Int64) -> Float32:
        """float32 `[len(heads), len(tails)]`, for entities that may be its heads and tails."""
        of, by = self.entities[heads], self.relations[relation]
        real, imaginary, by_real, by_imaginary = of[:, :_NUMBERS], of[:, _NUMBERS:], by[:_NUMBERS], by[_NUMBERS:]
        query = np.hstack([real * by_real - imaginary * by_imaginary, real * by_imaginary + imaginary * by_real])
        odds: Float32 = query @ self.entities[tails].T
        odds += self.popularity[heads, None]
        odds += self.popularity[tails]
        return odds

    def mrr(self, graph: KnowledgeGraph, split: str = "valid") -> float:
        """The filtered MRR of ranking a split of a drawn graph by the odds, over head and tail queries."""
        known, asked = np.concatenate([getattr(graph, name) for name in SPLITS]), getattr(graph, split)
        total = 0.0
        for relation in range(self.size.relations):
            heads, tails = self.members(relation)
            odds = self.log_odds(relation, heads, tails)
            rows, columns = _cells(asked, relation, heads, tails)
            answers = odds[rows, columns]
            odds[_cells(known, relation, heads, tails)] = -np.inf
            for better in ((odds[rows] > answers[:, None]).sum(1), (odds[:, columns] > answers).sum(0)):
                total += float((1 / (1 + better)).sum())
        return total / (2 * len(asked))


def drawn_graph(model: HiddenModel, seed: int) -> KnowledgeGraph:
    """A graph of the model's size; every entity and every relation has a training triple.

    Raises:
        BadInput: the relations have not enough possible triples.
    """
    random, size, counts = np.random.default_rng(seed), model.size, _counts(model)
    if counts.sum() < size.triples:
        raise BadInput(f"{size.triples:,} triples are too many to draw; there is room for {counts.sum():,}")
    triples = np.vstack([_of_relation(model, each, count, random) for each, count in enumerate(counts)])
    missing = np.flatnonzero(np.bincount(triples[:, [0, 2]].ravel(), minlength=size.entities) == 0)
    triples = np.unique(np.vstack([triples, *(_of_entity(model, int(each), random) for each in missing)]), axis=0)
    triples = triples[~_spared(triples, len(triples) - size.triples, size, random)]
    aside = _spared(triples, size.valid + size.test, size, random)
    held_out = random.permutation(triples[aside]).astype(np.int32)
    return KnowledgeGraph(
        "drawn",
        Names([f"e{entity}" for entity in range(size.entities)]),
        Names([f"r{relation}" for relation in range(size.relations)]),
        random.permutation(triples[~aside]).astype(np.int32),
        held_out[: size.valid],
        held_out[size.valid :],
    )


def _zipf(count: int, exponent: float, shift: float) -> npt.NDArray[np.float64]:
    weights = (shift + np.arange(count)) ** -exponent
    return np.asarray(weights / weights.sum(), np.float64)


def _counts(model: HiddenModel) -> Int64:
    """int64 `[R]`: triples of each relation, by Zipf's law, the most where most are possible; at least those asked."""
    members = np.bincount(model.types, minlength=_TYPES)
    most = _FULLEST * members[model.ends].prod(1)
    counts = np.empty(model.size.relations)
    counts[np.argsort(-most)] = model.size.triples * _zipf(model.size.relations, _RELATION_ZIPF, _RELATION_SHIFT)
    for _ in range(100):  # what is over goes to those that have room
        counts = np.minimum(counts, most)
        room = counts < most
        if not room.any():
            break
        counts[room] *= 1 + max(0.0, model.size.triples - counts.sum()) / counts[room].sum()
    whole: Int64 = np.ceil(np.minimum(counts, most)).astype(np.int64)
    return whole


def _of_relation(model: HiddenModel, relation: int, count: int, random: np.random.Generator) -> Int64:
    """int64 `[count, 3]`: different triples; each next one is drawn in proportion to its odds among those left.

    The smallest of exponential variables divided by the odds are such a draw.
    """
    heads, tails = model.members(relation)
    odds = model.log_odds(relation, heads, tails)
    arrivals = np.log(random.standard_exponential(odds.shape, np.float32) + np.float32(1e-30)) - odds
    first = np.argpartition(arrivals, min(count, arrivals.size) - 1, axis=None)[:count]
    rows, columns = np.divmod(first, len(tails))
    return np.stack([heads[rows], np.full(len(first), relation), tails[columns]], axis=1)


def _of_entity(model: HiddenModel, entity: int, random: np.random.Generator) -> Int64:
    """int64 `[1, 3]`: a triple of the entity, of a relation of its type, the other end drawn by the odds."""
    relation, end = random.permutation(np.argwhere(model.ends == model.types[entity]))[0].tolist()
    sides = list(model.members(relation))
    sides[end] = np.array([entity])
    odds = model.log_odds(relation, sides[0], sides[1]).ravel()
    other = sides[1 - end][np.argmin(np.log(random.standard_exponential(len(odds))) - odds)]
    return np.array([[entity, relation, other] if end == 0 else [other, relation, entity]])


def _cells(triples: npt.NDArray[np.integer], relation: int, heads: Int64, tails: Int64) -> tuple[Int64, Int64]:
    """Rows and columns of a relation's triples in the matrix of its heads and tails."""
    found = triples[triples[:, 1] == relation]
    return np.searchsorted(heads, found[:, 0]), np.searchsorted(tails, found[:, 2])


def _spared(triples: Int64, count: int, size: DrawnSize, random: np.random.Generator) -> npt.NDArray[np.bool_]:
    """bool `[N]`: `count` random triples without which every entity and relation still has one."""
    columns = triples + np.array([0, size.entities, 0])
    left = np.bincount(columns.ravel(), minlength=size.entities + size.relations).tolist()
    chosen, listed = np.zeros(len(triples), np.bool_), columns.tolist()
    for place in random.permutation(len(triples)).tolist():
        if count <= 0:
            break
        head, relation, tail = listed[place]
        if min(left[head] - (head == tail), left[relation], left[tail]) > 1:
            for each in listed[place]:
                left[each] -= 1
            chosen[place], count = True, count - 1
    return chosen
