"""Row layouts say what the columns are: scores computed from the parts by name, in float64, are the scores."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pytest

from elastable.replicas.knowledge_graphs.scores.catalogue import SCORES, RowPart, row_layout, score_function

DIM, TRIPLES = 8, 5
Array = npt.NDArray[np.float64]
Parts = Mapping[str, Array]


def _unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _l1(x: Array) -> Array:
    return np.asarray(-np.abs(x).sum(axis=1))


def _number(parts: Parts) -> npt.NDArray[np.complex128]:
    return parts["real"] + 1j * parts["imaginary"]


def _interht(h: Parts, r: Parts, t: Parts, more: Array | float = 0.0) -> Array:
    head, tail = _unit(h["embedding"]), _unit(t["embedding"])
    return _l1(head * (_unit(t["aid"]) + 1) - tail * (_unit(h["aid"]) + 1) + r["translation"] + more)


def _trans(h: Parts, r: Parts, t: Parts) -> Array:
    return _interht(h, r, t, r["head scale"] * _unit(h["embedding"]) + r["tail scale"] * _unit(t["embedding"]))


def _boxe(h: Parts, r: Parts, t: Parts) -> Array:
    def far(point: Array, end: str) -> Array:
        raw = r[f"{end} width"]
        width = np.where(raw > 0, raw, np.expm1(np.minimum(raw, 0))) + 1
        size = np.abs(point - r[f"{end} middle"])
        kappa = 0.5 * width * (width + 1 - 1 / (width + 1))
        return np.where(size <= width / 2, size / (width + 1), size * (width + 1) - kappa)

    return _l1(far(h["point"] + t["bump"], "head")) + _l1(far(t["point"] + h["bump"], "tail"))


def _triplere(h: Parts, r: Parts, t: Parts) -> Array:
    scaled = _unit(h["embedding"]) * (r["head scale"] + 1) - _unit(t["embedding"]) * (r["tail scale"] + 1)
    return _l1(scaled + r["translation"])


SCORED: dict[str, Callable[[Parts, Parts, Parts], Array]] = {
    "TransE": lambda h, r, t: _l1(h["embedding"] + r["translation"] - t["embedding"]),
    "RotatE": lambda h, r, t: -np.abs(_number(h) * np.exp(1j * r["phase"]) - _number(t)).sum(axis=1),
    "DistMult": lambda h, r, t: (h["embedding"] * r["diagonal"] * t["embedding"]).sum(axis=1),
    "ComplEx": lambda h, r, t: (_number(h) * _number(r) * np.conj(_number(t))).sum(axis=1).real,
    "PairRE": lambda h, r, t: _l1(_unit(h["embedding"]) * r["head scale"] - _unit(t["embedding"]) * r["tail scale"]),
    "TripleRE": _triplere,
    "InterHT": _interht,
    "TranS": _trans,
    "BoxE": _boxe,
    "CP": lambda h, r, t: (h["as head"] * r["diagonal"] * t["as tail"]).sum(axis=1),
    "TuckER": lambda h, r, t: np.einsum("ijk,bi,bj,bk->b", _core(), h["embedding"], r["embedding"], t["embedding"]),
}


def _core() -> Array:
    return score_function("TuckER", DIM).dense["core"].astype(np.float64)


def _named(parts: tuple[RowPart, ...], rows: npt.NDArray[np.float32]) -> dict[str, Array]:
    assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])]
    assert parts[-1].last == rows.shape[1]
    return {part.name: np.asarray(rows[:, part.first : part.last], np.float64) for part in parts}


@pytest.mark.parametrize("name", [name for name in SCORES if name != "ConvE"])
def test_parts_make_the_score(name: str) -> None:
    score, draw = score_function(name, DIM, 1 if SCORES[name].norms else None), np.random.default_rng(4)
    head, tail = (draw.standard_normal((TRIPLES, score.entity_width)).astype(np.float32) for _ in range(2))
    relation = draw.standard_normal((TRIPLES, score.relation_width)).astype(np.float32)
    layout = row_layout(score)
    found = SCORED[name](
        _named(layout["entity"], head), _named(layout["relation"], relation), _named(layout["entity"], tail)
    )
    np.testing.assert_allclose(score.score_triples(head, relation, tail), found, rtol=2e-5, atol=2e-5)


def test_the_bias_of_conve_is_the_last_column() -> None:
    score, draw = score_function("ConvE", DIM), np.random.default_rng(4)
    layout = row_layout(score)
    assert [(part.name, part.first, part.last) for part in layout["entity"]] == [("embedding", 0, 8), ("bias", 8, 9)]
    rows = draw.standard_normal((2, 9)).astype(np.float32)
    relation = draw.standard_normal((1, score.relation_width)).astype(np.float32)
    query = score.query(rows[:1], relation, "tail")
    expected = query[0, :8] @ rows[1, :8] + rows[1, 8]
    assert score.score_triples(rows[:1], relation, rows[1:])[0] == pytest.approx(expected, rel=1e-5)
