"""Score functions against independent formulas in TensorFlow (float64), and their gradients."""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import RangePool
from elastable.replicas.groups.thread_group import alone
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.scores.dot_products import (
    blas_threads,
    one_blas_thread,
    product_gradients,
    products,
)
from elastable.replicas.knowledge_graphs.scores.functions import SCORES, ScoreFunction, score_function
from tests.replicas.knowledge_graphs.graphs import scores_of

DIM, TRIPLES, CANDIDATES = 8, 6, 5
Array = npt.NDArray[np.float32]

# The formulas as the papers print them, of the parts of rows by name; e.g. complex numbers as complex numbers.

Parts = dict[str, tf.Tensor]


def _size(x: tf.Tensor, norm: int) -> tf.Tensor:
    return tf.reduce_sum(tf.abs(x), -1) if norm == 1 else tf.sqrt(tf.reduce_sum(x * x, -1))


def _number(parts: Parts) -> tf.Tensor:
    return tf.complex(parts["real"], parts["imaginary"])


def _unit(x: tf.Tensor) -> tf.Tensor:
    return x / tf.sqrt(tf.reduce_sum(x * x, -1, keepdims=True))


def _rotate(h: Parts, r: Parts, t: Parts, norm: int) -> tf.Tensor:
    turn = tf.exp(tf.complex(tf.zeros_like(r["phase"]), r["phase"]))
    return -tf.reduce_sum(tf.abs(_number(h) * turn - _number(t)), -1)


def _complex(h: Parts, r: Parts, t: Parts, norm: int) -> tf.Tensor:
    return tf.math.real(tf.reduce_sum(_number(h) * _number(r) * tf.math.conj(_number(t)), -1))


def _pairre(h: Parts, r: Parts, t: Parts, norm: int, plus: int = 0) -> tf.Tensor:
    head, tail = _unit(h["embedding"]) * (r["head scale"] + plus), _unit(t["embedding"]) * (r["tail scale"] + plus)
    return -_size(head - tail + r.get("translation", 0), norm)


def _interht(h: Parts, r: Parts, t: Parts, norm: int) -> tf.Tensor:
    """With TranS' scales, where there are any."""
    head, tail = _unit(h["embedding"]), _unit(t["embedding"])
    moved = r["translation"] + r.get("head scale", 0) * head + r.get("tail scale", 0) * tail
    return -_size(head * (_unit(t["aid"]) + 1) - tail * (_unit(h["aid"]) + 1) + moved, norm)


def _boxe(h: Parts, r: Parts, t: Parts, norm: int) -> tf.Tensor:
    def far(point: tf.Tensor, end: str) -> tf.Tensor:
        middle, width = r[f"{end} middle"], tf.nn.elu(r[f"{end} width"]) + 1
        low, high = middle - width / 2, middle + width / 2
        kappa = 0.5 * width * (width + 1 - 1 / (width + 1))
        size = tf.abs(point - middle)
        return tf.where((low <= point) & (point <= high), size / (width + 1), size * (width + 1) - kappa)

    return -_size(far(h["point"] + t["bump"], "head"), norm) - _size(far(t["point"] + h["bump"], "tail"), norm)


def _conve(h: Parts, r: Parts, t: Parts, norm: int) -> tf.Tensor:
    dense = {name: tf.constant(value, tf.float64) for name, value in score_function("ConvE", DIM).dense.items()}
    lead = tf.shape(h["embedding"])[:-1]
    image = tf.reshape(tf.concat([tf.reshape(x["embedding"], [-1, DIM]) for x in (h, r)], axis=1), [-1, 8, 2, 1])
    norm_of = tf.keras.layers.LayerNormalization
    maps = tf.nn.conv2d(image, dense["filters"], 1, "SAME") + dense["filters_bias"]
    maps = tf.nn.relu(norm_of(axis=[1, 2, 3], epsilon=1e-5, center=False, scale=False, dtype="float64")(maps))
    hidden = tf.reshape(maps, [tf.shape(maps)[0], -1]) @ dense["hidden"] + dense["hidden_bias"]
    hidden = tf.nn.relu(norm_of(epsilon=1e-5, center=False, scale=False, dtype="float64")(hidden))
    query = tf.reshape(hidden, tf.concat([lead, [DIM]], 0))
    return tf.reduce_sum(query * t["embedding"], -1) + t["bias"][..., 0]


def _tucker(h: Parts, r: Parts, t: Parts, norm: int) -> tf.Tensor:
    rows = [x["embedding"] for x in (h, r, t)]
    core = tf.constant(score_function("TuckER", rows[0].shape[-1]).dense["core"], tf.float64)
    return tf.einsum("ijk,...i,...j,...k->...", core, *rows)


FORMULAS: dict[str, Callable[..., tf.Tensor]] = {
    "TransE": lambda h, r, t, norm: -_size(h["embedding"] + r["translation"] - t["embedding"], norm),
    "RotatE": _rotate,
    "DistMult": lambda h, r, t, norm: tf.reduce_sum(h["embedding"] * r["diagonal"] * t["embedding"], -1),
    "ComplEx": _complex,
    "PairRE": _pairre,
    "TripleRE": partial(_pairre, plus=1),
    "BoxE": _boxe,
    "InterHT": _interht,
    "TranS": _interht,
    "ConvE": _conve,
    "CP": lambda h, r, t, norm: tf.reduce_sum(h["as head"] * r["diagonal"] * t["as tail"], -1),
    "TuckER": _tucker,
}


def formula(score: ScoreFunction, heads: tf.Tensor, relations: tf.Tensor, tails: tf.Tensor) -> tf.Tensor:
    """Scores of triples by their rows in float64; the layout of rows says which columns the formula's parts are."""
    layout = score.layout()

    def parts(rows: tf.Tensor, kind: str) -> Parts:
        assert [0, *(part.last for part in layout[kind])] == [*(part.first for part in layout[kind]), rows.shape[-1]]
        return {part.name: rows[..., part.first : part.last] for part in layout[kind]}

    ends = parts(heads, "entity"), parts(relations, "relation"), parts(tails, "entity")
    return FORMULAS[score.name](*ends, score.comparison.norm)


WITH_NORMS = ("TransE", "PairRE", "TripleRE", "BoxE", "InterHT", "TranS")
CASES = [(name, norm) for name in FORMULAS for norm in ((1, 2) if name in WITH_NORMS else (1,))]


def _score_function(name: str, norm: int) -> ScoreFunction:
    return score_function(name, DIM, norm if name in WITH_NORMS else None)


def _embeddings(score: ScoreFunction, per_triple: bool) -> tuple[Array, Array, Array]:
    draw = np.random.default_rng(7)
    given = draw.standard_normal((TRIPLES, score.entity_width)).astype(np.float32)
    relations = draw.standard_normal((TRIPLES, score.relation_width)).astype(np.float32)
    shape = (TRIPLES, CANDIDATES) if per_triple else (CANDIDATES,)
    return given, relations, draw.standard_normal((*shape, score.entity_width)).astype(np.float32)


def _expected(
    score: ScoreFunction, side: str, given: tf.Tensor, relations: tf.Tensor, candidates: tf.Tensor
) -> tf.Tensor:
    """`[b, n]` in float64, by the formula of a triple."""
    given, relations = given[:, None], relations[:, None]
    candidates = candidates if len(candidates.shape) == 3 else candidates[None]
    shape = [TRIPLES, CANDIDATES]
    parts = [tf.broadcast_to(x, [*shape, x.shape[-1]]) for x in (given, relations, candidates)]
    head, tail = (parts[0], parts[2]) if side == "tail" else (parts[2], parts[0])
    return formula(score, head, parts[1], tail)


def test_every_score_function_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(SCORES)


@pytest.mark.parametrize("per_triple", [False, True])
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_scores_and_gradients_are_those_of_the_formula(name: str, norm: int, per_triple: bool) -> None:
    score = _score_function(name, norm)
    for side in score.sides:
        given, relations, candidates = _embeddings(score, per_triple)
        weights = np.random.default_rng(1).standard_normal((TRIPLES, CANDIDATES)).astype(np.float32)
        variables = [tf.Variable(x, dtype=tf.float64) for x in (given, relations, candidates)]
        with tf.GradientTape() as tape:
            expected = _expected(score, side, *variables)
            total = tf.reduce_sum(expected * weights)
        gradients = tape.gradient(total, variables)
        found = scores_of(score, given, relations, candidates, side)
        np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=2e-5)
        for mine, theirs in zip(_gradients(score, side, given, relations, candidates, weights), gradients, strict=True):
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-4, atol=1e-4)


def _gradients(
    score: ScoreFunction, side: Side, given: Array, relations: Array, candidates: Array, weights: Array
) -> tuple[Array, Array, Array]:
    rows = np.ascontiguousarray(candidates.reshape(-1, score.entity_width))
    places = np.arange(len(rows)).reshape(1 if candidates.ndim == 2 else TRIPLES, -1)
    ready, mine = score.prepared(rows), score.prepared(given)
    queries = score.query(mine, relations, side)
    scores = score.comparison.scores(queries, ready, places)
    to_rows = np.zeros_like(rows)
    to_queries = score.comparison.gradients(queries, ready, places, scores, weights, places, to_rows)
    to_given, to_relations, _ = score.query_gradients(mine, relations, side, to_queries)
    to_rows = score.unprepared(rows, to_rows)
    return score.unprepared(given, to_given), to_relations, to_rows.reshape(candidates.shape)


@pytest.mark.parametrize(("name", "side"), [("ConvE", "tail"), ("TuckER", "head"), ("TuckER", "tail")])
def test_further_variables_have_the_gradients_of_the_formula(name: str, side: Side) -> None:
    """Along directions drawn at random, against differences in double precision."""
    score = score_function(name, DIM, seed=5)
    given, relations, _ = _embeddings(score, False)
    weights = np.random.default_rng(1).standard_normal((TRIPLES, score.query_width)).astype(np.float32)
    *_, dense = score.query_gradients(given, relations, side, weights)
    assert set(dense) == set(score.dense)
    start, way = dict(score.dense), np.random.default_rng(2)
    for variable, gradient in dense.items():
        for _ in range(5):
            along, totals = way.standard_normal(gradient.shape).astype(np.float32), []
            for sign in (1, -1):
                moved: Array = start[variable] + np.float64(sign * 1e-4) * along  # type: ignore[assignment]
                score.bind({**start, variable: moved})
                totals.append((score.exact_query(given, relations, side) * weights).sum())
            assert (totals[0] - totals[1]) / 2e-4 == pytest.approx((gradient * along).sum(), rel=0.01, abs=0.02)
    score.bind(start)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_triples_score_as_their_own_candidates(name: str, norm: int) -> None:
    score = _score_function(name, norm)
    given, relations, candidates = _embeddings(score, True)
    tails = np.ascontiguousarray(candidates[:, 0])
    found = score.score_triples(given, relations, tails)
    np.testing.assert_array_equal(found, scores_of(score, given, relations, candidates, "tail")[:, 0])
    if "head" in score.sides:
        heads = scores_of(score, tails, relations, given[:, None], "head")
        np.testing.assert_allclose(found, heads[:, 0], rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 64])
@pytest.mark.parametrize("name", ["TransE", "RotatE", "ComplEx", "PairRE", "InterHT", "BoxE"])
def test_threads_change_no_bit(name: str, groups: int) -> None:
    score = score_function(name, 64)
    draw = np.random.default_rng(5)
    rows = score.prepared(draw.standard_normal((300, score.entity_width)).astype(np.float32))
    queries = draw.standard_normal((64, score.query_width)).astype(np.float32)
    places = draw.integers(0, 300, (groups, 128))
    weights = draw.standard_normal((64, 128)).astype(np.float32)
    found = []
    for threads in (1, 3):
        pool = RangePool(threads)
        scores = score.comparison.scores(queries, rows, places, pool)
        to_rows = np.zeros_like(rows)
        to_queries = score.comparison.gradients(queries, rows, places, scores, weights, places, to_rows, pool)
        found.append((scores, to_rows, to_queries))
        pool.close()
    for one, three in zip(*found, strict=True):
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize(
    ("name", "dim", "norm", "message"),
    [
        ("Complex2", 8, None, "known are TransE, RotatE"),
        ("ComplEx", 7, None, "must be even"),
        ("RotatE", 7, None, "must be even"),
        ("TransE", 8, 3, "norm 3"),
        ("ConvE", 3, None, "image"),
        ("DistMult", 0, None, "at least 1"),
        ("DistMult", 8, 2, "norm 2 of DistMult: its score is a product and not a distance; leave the norm out"),
        ("ComplEx", 8, 1, "leave the norm out"),
        ("ConvE", 8, 1, "leave the norm out"),
        ("RotatE", 8, 2, "norm 2 of RotatE: its distance is always the sum of the moduli"),
    ],
)
def test_invalid_arguments_are_refused(name: str, dim: int, norm: int | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        score_function(name, dim, norm)


def test_conve_answers_tail_queries_only() -> None:
    with pytest.raises(BadInput, match="reciprocal"):
        score_function("ConvE", DIM).require_side("head")


@pytest.mark.parametrize(("name", "variables"), [("ConvE", ("filters", "hidden")), ("TuckER", ("core",))])
def test_the_seed_decides_further_variables(name: str, variables: tuple[str, ...]) -> None:
    one, same, other = (score_function(name, DIM, seed=seed).dense for seed in (3, 3, -4))
    for variable in variables:
        np.testing.assert_array_equal(one[variable], same[variable])
        assert (one[variable] != other[variable]).any()


def test_a_run_of_conve_starts_from_its_seed() -> None:
    triples = np.array([[0, 0, 1]], np.int32)
    first, second = (
        GraphTrainer(alone(), TrainSettings(model="ConvE", dim=DIM, seed=seed), 2, 1, triples).state()
        for seed in (0, 1)
    )
    assert (first["dense.filters"] != second["dense.filters"]).any()


# Matrix products in blocks: the numbers of float64, the same bits for any number of threads, one thread of BLAS


WIDTH = 24


@pytest.mark.parametrize("count", [0, 1, 7, 2048, 5000])
@pytest.mark.parametrize("order", ["all", "some", "repeated"])
def test_products_and_their_gradients_are_those_of_float64(count: int, order: str) -> None:
    draw = np.random.default_rng(count)
    rows = draw.normal(size=(count if order == "all" else count + 100, WIDTH)).astype(np.float32)
    queries, slopes = (draw.normal(size=(9, width)).astype(np.float32) for width in (WIDTH, count))
    places = np.arange(count) if order == "all" else draw.integers(0, max(1, count // 3), count)
    unique, targets = (places, places) if order == "all" else np.unique(places, return_inverse=True)
    if order == "some":  # every candidate is summed for itself, wherever it was read
        unique, targets = places, np.arange(count)
    found: dict[int, tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], ...]] = {}
    for threads in (1, 3):
        pool = RangePool(threads)
        scores = np.full((9, count), np.nan, np.float32)
        products(queries, rows, places, scores, pool)
        to_rows = np.ones((len(unique), WIDTH), np.float32)
        to_queries = product_gradients(queries, rows, places, slopes, targets, to_rows, pool)
        found[threads] = scores, to_queries, to_rows
        pool.close()
    exact = queries.astype(np.float64), rows[places].astype(np.float64), slopes.astype(np.float64)
    wanted_rows = np.ones((len(unique), WIDTH))
    np.add.at(wanted_rows, targets, exact[2].T @ exact[0])
    for mine, wanted in zip(found[1], (exact[0] @ exact[1].T, exact[2] @ exact[1], wanted_rows), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4)
    for one, three in zip(found[1], found[3], strict=True):
        np.testing.assert_array_equal(one, three)


def test_blas_has_one_thread_until_the_last_caller_has_left() -> None:
    before = blas_threads()
    assert before  # NumPy's wheels have OpenBLAS
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_blas_thread():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with one_blas_thread():
        thread.start()
        assert inside.wait(60)
        assert set(blas_threads()) <= {1}
    assert set(blas_threads()) <= {1}
    leave.set()
    thread.join()
    assert blas_threads() == before
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        _ = 1 / 0
    assert blas_threads() == before
