"""What bounds a step of knowledge-graph training: its processor time next to that of work which no step can avoid.

A graph of FB15k-237's size, one worker. With all entities as candidates, ComplEx
multiplies matrices: the reference computes products of the same shapes, which are
taken from a step, with one thread of BLAS and nothing else. With candidates for
each triple a step waits for memory: the reference reads the candidates' rows for
the scores, and reads them and adds to their gradients for the gradients.

    python -m benchmarks.graphs.kg_bounds
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numba
import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish
from benchmarks.peers import workloads
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.scores import dot_products
from elastable.replicas.knowledge_graphs.scores.dot_products import one_blas_thread, product_gradients, products

Shape = tuple[int, int, int]
"""Rows of the left matrix, what is summed over, columns of the right one."""

_ENTITIES, _RELATIONS, _TRIPLES = 14_541, 237, 272_115
_DIM, _BATCH, _NEGATIVES = 256, 512, 64
_STEPS, _ROUNDS = 10, 7


def main() -> None:
    """Measures, prints, and writes `results/kg_bounds.json`."""
    publish("kg_bounds", "A step of ComplEx beside what bounds it", [product_row(), row_reads_row()])


def product_row(entities: int = _ENTITIES, dim: int = _DIM, steps: int = _STEPS, rounds: int = _ROUNDS) -> Row:
    """Steps with all entities as candidates; the reference is their matrix products alone."""

    def measure(trainer: GraphTrainer) -> Row:
        with _recorded() as shapes:
            trainer.run_step()
        draw = np.random.default_rng(0)
        matrices = [(_matrix(draw, m, k), _matrix(draw, k, n), np.empty((m, n), np.float32)) for m, k, n in shapes]

        def multiply() -> None:
            with one_blas_thread():
                for left, right, found in matrices:
                    np.matmul(left, right, out=found)

        figures = interleaved({"step": _pace(trainer.run_step, steps), "products": _pace(multiply, steps)}, rounds)
        name = f"steps of ComplEx {dim}, all {entities:,} entities as candidates, against their {len(shapes)} products"
        return compare(name, "steps/CPU s", figures["step"], figures["products"])

    return _with_trainer(TrainSettings(dim=dim, batch=_BATCH), entities, measure)


def row_reads_row(entities: int = _ENTITIES, dim: int = _DIM, steps: int = _STEPS, rounds: int = _ROUNDS) -> Row:
    """Steps with candidates for each triple; the reference reads and writes what their rows and gradients take."""

    def measure(trainer: GraphTrainer) -> Row:
        draw = np.random.default_rng(0)
        rows, query = _matrix(draw, entities, dim), _matrix(draw, 1, dim)[0]
        gradients = np.zeros_like(rows)
        candidates = draw.integers(0, entities, _BATCH * (_NEGATIVES + 1))
        scores = np.empty(len(candidates), np.float32)

        def touch() -> None:
            _scored(rows, candidates, query, scores)
            _added(rows, candidates, scores, gradients)

        trainer.run_step()
        touch()  # compiles
        figures = interleaved({"step": _pace(trainer.run_step, steps), "rows": _pace(touch, steps)}, rounds)
        name = f"steps of ComplEx {dim}, {_NEGATIVES} candidates for each triple, against reading and adding their rows"
        return compare(name, "steps/CPU s", figures["step"], figures["rows"])

    settings = TrainSettings(dim=dim, batch=_BATCH, loss="log-sigmoid", negatives=_NEGATIVES, shared=False)
    return _with_trainer(settings, entities, measure)


def _with_trainer(settings: TrainSettings, entities: int, measure: Callable[[GraphTrainer], Row]) -> Row:
    triples = workloads.triples(entities, _RELATIONS, _TRIPLES).astype(np.int32)

    def work(group: ReplicaGroup) -> Row:
        return measure(GraphTrainer(group, settings, entities, _RELATIONS, triples))

    return run_threads(1, work)[0]


@contextmanager
def _recorded() -> Iterator[list[Shape]]:
    """The shapes of the products that scores and their gradients are made of, while it is open."""
    shapes: list[Shape] = []

    def scores(queries: Float32, rows: Float32, places: Int64, *rest: object) -> None:
        shapes.append((len(queries), queries.shape[1], len(places)))
        products(queries, rows, places, *rest)  # type: ignore[arg-type]

    def gradients(queries: Float32, rows: Float32, places: Int64, *rest: object) -> Float32:
        shapes.append((len(queries), len(places), queries.shape[1]))
        shapes.append((len(places), len(queries), queries.shape[1]))
        return product_gradients(queries, rows, places, *rest)  # type: ignore[arg-type]

    with patch.object(dot_products, "products", scores), patch.object(dot_products, "product_gradients", gradients):
        yield shapes


def _matrix(draw: np.random.Generator, rows: int, columns: int) -> Float32:
    return draw.standard_normal((rows, columns), np.float32)


def _pace(work: Callable[[], object], times: int) -> Callable[[], float]:
    """How often it is done in a second of processor time."""

    def measure() -> float:
        began = time.process_time()
        for _ in range(times):
            work()
        return times / (time.process_time() - began)

    return measure


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _scored(rows: Float32, places: Int64, query: Float32, found: Float32) -> None:
    for number in range(len(places)):
        row = rows[places[number]]
        total = np.float32(0.0)
        for column in range(len(query)):
            total += row[column] * query[column]
        found[number] = total


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _added(rows: Float32, places: Int64, slopes: Float32, gradients: Float32) -> None:
    for number in range(len(places)):
        row, gradient = rows[places[number]], gradients[places[number]]
        for column in range(len(row)):
            gradient[column] += slopes[number] * row[column]


if __name__ == "__main__":
    main()
