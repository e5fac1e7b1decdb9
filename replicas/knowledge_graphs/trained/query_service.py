"""Queries to a trained model as JSON values: validated, bounded, and answered in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation.candidates import Candidates
from elastable.replicas.knowledge_graphs.trained.link_predictor import LinkPredictor, Query
from elastable.replicas.knowledge_graphs.trained.neighbors import MEASURES, nearest_neighbors

__all__ = ["MOST_ANSWERS", "MOST_QUERIES", "QueryService"]

MOST_QUERIES = 10_000
"""Queries, triples or entities in one request."""

MOST_ANSWERS = 1_000_000
"""Answers of one request, over all its queries."""

_LONGEST_NAME = 10_000


class QueryService:
    """Answers requests about one model, one at a time; safe to call from several threads.

    A request is a mapping, as JSON gives it, of these members:

        predict    queries: [{"relation", and "head" or "tail"}], top = 10, new = false, among = null: [entity]
        score      triples: [[head, relation, tail]], side = "tail"
        neighbors  entities: [entity], top = 10, measure = "cosine", among = null: [entity]

    Args:
        predictor: The model.

    Attributes:
        requests: Name -> what answers it; each raises BadInput for a malformed request or an unknown name.
    """

    def __init__(self, predictor: LinkPredictor) -> None:
        self._predictor, self._trained, self._lock = predictor, predictor.trained, threading.Lock()
        self.requests: Mapping[str, Callable[[Mapping[str, object]], dict[str, object]]] = {
            "predict": self.predict,
            "score": self.score,
            "neighbors": self.neighbors,
        }

    def about(self) -> dict[str, object]:
        """The model and its sizes."""
        trained = self._trained
        return {
            "model": trained.settings.model,
            "dim": trained.settings.dim,
            "entities": len(trained.entities),
            "relations": len(trained.relations),
            "requests": sorted(self.requests),
        }

    def predict(self, request: Mapping[str, object]) -> dict[str, object]:
        """{"answers": [[{"entity", "score"}]]}: the best answers to each query, best first."""
        _require_members(request, "queries", "top", "new", "among")
        queries = [_query(given, f"queries[{place}]") for place, given in enumerate(_list(request, "queries"))]
        top, new = _count(request, len(queries)), request.get("new", False)
        if not isinstance(new, bool):
            raise BadInput("new must be true or false")
        with self._lock:
            found = self._predictor.answer(queries, k=top, new=new, among=self._among(request))
        return {"answers": [[{"entity": each.entity, "score": each.score} for each in best] for best in found]}

    def score(self, request: Mapping[str, object]) -> dict[str, object]:
        """{"scores": [number]}, one for each triple."""
        _require_members(request, "triples", "side")
        side, trained = request.get("side", "tail"), self._trained
        if side not in ("head", "tail"):
            raise BadInput('side must be "head" or "tail"')
        ids = []
        for place, given in enumerate(_list(request, "triples")):
            if not isinstance(given, list) or len(given) != 3:
                raise BadInput(f"triples[{place}] must be [head, relation, tail]")
            head, relation, tail = (_name(each, f"triples[{place}]") for each in given)
            ids.append((trained.entities.id_of(head), trained.relations.id_of(relation), trained.entities.id_of(tail)))
        triples = np.array(ids, np.int32).reshape(-1, 3)
        with self._lock:
            scores = trained.triple_scores(triples, "head" if side == "head" else "tail")
        return {"scores": scores.tolist()}

    def neighbors(self, request: Mapping[str, object]) -> dict[str, object]:
        """{"neighbors": [[{"entity", "similarity"}]]}: the nearest entities of each, nearest first."""
        _require_members(request, "entities", "top", "measure", "among")
        trained, measure = self._trained, request.get("measure", MEASURES[0])
        if measure not in MEASURES:
            raise BadInput(f"measure must be one of {', '.join(MEASURES)}")
        names = [_name(each, f"entities[{place}]") for place, each in enumerate(_list(request, "entities"))]
        top, ids = _count(request, len(names)), trained.entities.ids_of(names)
        with self._lock:
            near = nearest_neighbors(trained, ids, top, str(measure), self._among(request))
        return {
            "neighbors": [
                [
                    {"entity": trained.entities[entity], "similarity": similarity}
                    for entity, similarity in zip(*row, strict=True)
                    if similarity > -np.inf
                ]
                for row in zip(near.entities.tolist(), near.similarities.tolist(), strict=True)
            ]
        }

    def _among(self, request: Mapping[str, object]) -> Candidates | None:
        if request.get("among") is None:
            return None
        count = len(self._trained.entities)
        names = [_name(each, f"among[{place}]") for place, each in enumerate(_list(request, "among", count))]
        return Candidates.of_list(self._trained.entities.ids_of(names), count)


def _require_members(request: Mapping[str, object], *known: str) -> None:
    unknown = sorted(set(request) - set(known))
    if unknown:
        raise BadInput(f"a request has {', '.join(known)}; it has no {_shown(unknown[0])}")


def _list(request: Mapping[str, object], name: str, most: int = MOST_QUERIES) -> list[object]:
    given = request.get(name)
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise BadInput(f"{name} must be a list of 1 to {most}")
    return given


def _query(given: object, where: str) -> Query:
    if not isinstance(given, dict) or not {"relation"} < set(given) <= {"relation", "head", "tail"}:
        raise BadInput(f'{where} must have "relation", and "head" or "tail"')
    parts = {name: _name(value, f"{where}.{name}") for name, value in given.items() if value is not None}
    if "relation" not in parts:
        raise BadInput(f'{where} must have "relation"')
    return Query(**parts)


def _name(given: object, where: str) -> str:
    if not isinstance(given, str) or len(given) > _LONGEST_NAME:
        raise BadInput(f"{where} must be a name, at most {_LONGEST_NAME} characters")
    return given


def _count(request: Mapping[str, object], queries: int) -> int:
    top = request.get("top", 10)
    if type(top) is not int or top < 1:
        raise BadInput("top must be a whole number from 1")
    if top * queries > MOST_ANSWERS:
        raise BadInput(f"{queries} times the best {top} are more than {MOST_ANSWERS} answers; ask in parts")
    return top


def _shown(name: object) -> str:
    return repr(str(name)[:80])
