"""Knowledge graphs: triples per processor second compared with PyKEEN's; score-moving compared with embedding-moving.

PyKEEN trains the same model with the same dimension, scores of a step, batch and
optimizer (Adam), on random graphs of the sizes of CoDEx-S, FB15k-237 and WN18RR;
both run on two threads and take turns. Seconds are those of the processors, which
other processes change less. PyKEEN runs in a separate environment in `.peers/`
(`make bench-peers` creates it).

Workers: one step of all, on 1 to 4 workers (threads) of two cores, with the bytes that a worker sends.

Schemes: two workers (threads) with candidates for each triple, with growing
numbers of candidates and dimensions; the plot shows where score-moving wins.

    python -m benchmarks.graphs.kg
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import RESULTS, Row, compare, drawing, interleaved, publish
from benchmarks.peers import workloads
from benchmarks.peers.environments import OURS, PYKEEN
from benchmarks.peers.races import Pairing, Race, Runner, run
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer

_FLOORS = {"CoDEx-S": 5.0, "FB15k-237": 5.0, "WN18RR": 3.0}
_GRAPHS = {"CoDEx-S": (2_034, 42, 32_888), "FB15k-237": (14_541, 237, 272_115), "WN18RR": (40_943, 11, 86_835)}
"""Sizes: entities, relations, triples."""

_DIM, _NEGATIVES, _BATCH = 128, 64, 512
_MODELS = ("TransE", "RotatE", "DistMult", "ComplEx")
_WHOLE = ("FB15k-237", (("DistMult", 128), ("ComplEx", 128), ("ComplEx", 256)))
"""The graph, the models and dimensions that are also trained with all entities."""
_WORKERS, _WORKER_ROUNDS, _WORKER_STEPS = (1, 2, 3, 4), 3, 10
_SIDES = "benchmarks.peers.sides"

_SCHEMES = ("score-moving", "embedding-moving")
_SCHEME_DIMS, _SCHEME_NEGATIVES = (32, 128, 512), (2, 8, 32, 128)
_SCHEME_BATCH, _SCHEME_STEPS, _SCHEME_ROUNDS = 256, 5, 5


def main() -> None:
    """Measures, prints, and writes `results/kg.json` and the picture of the crossover."""
    schemes = list(scheme_rows())
    title = "Knowledge graphs: Elastable vs. PyKEEN, 1 to 4 workers, score-moving vs. embedding-moving"
    publish("kg", title, [*peer_rows(), *worker_rows(), *schemes])
    draw(schemes, RESULTS / "kg_schemes.png")


def peer_rows(rounds: int = 5, seconds: float = 1.0) -> list[Row]:
    """Triples per processor second, compared with PyKEEN's."""
    graph, models = _WHOLE
    asked = [(each, model, _DIM, _NEGATIVES) for each in _GRAPHS for model in _MODELS]
    asked += [(graph, model, dim, 0) for model, dim in models]
    with tempfile.TemporaryDirectory(prefix="kg-") as home:
        return [row for each in asked for row in _against_pykeen(*each, Path(home), rounds, seconds)]


def _against_pykeen(
    graph: str, model: str, dim: int, negatives: int, home: Path, rounds: int, seconds: float
) -> list[Row]:
    entities, relations, triples = _GRAPHS[graph]
    settings = {
        "entities": entities,
        "relations": relations,
        "triples": triples,
        "dim": dim,
        "negatives": negatives,
        "batch": _BATCH,
    }
    runners = (
        Runner("elastable", OURS, f"{_SIDES}.elastable_triples", model),
        Runner("pykeen", PYKEEN, f"{_SIDES}.pykeen_triples", model),
    )
    others = f"{negatives} negatives each" if negatives else "all entities"
    name = f"{model} {dim}, {others}, {graph}'s size, against PyKEEN"
    race = Race("triples/CPU s", runners, (Pairing(name, "elastable", "pykeen", _FLOORS[graph]),), settings)
    return run(race, home, rounds, seconds)


def worker_rows(rounds: int = _WORKER_ROUNDS) -> Iterator[Row]:
    """Triples per processor second of 1 to 4 workers together, the reference one worker; and the bytes of each."""
    entities, relations, count = _GRAPHS["FB15k-237"]
    triples = workloads.triples(entities, relations, count).astype(np.int32)
    for name, settings in {
        "64 negatives each": TrainSettings(dim=_DIM, loss="log-sigmoid", negatives=_NEGATIVES, shared=False),
        "all entities": TrainSettings(dim=_DIM),
    }.items():
        sent = dict[int, int]()

        def pace(workers: int, settings: TrainSettings = settings, sent: dict[int, int] = sent) -> float:
            def work(group: ReplicaGroup) -> float:
                pool = RangePool(max(1, available_cores() // workers))
                trainer = GraphTrainer(group, settings, entities, relations, triples, pool)
                trainer.run_step()
                group.barrier()
                before, began = group.bytes_sent, time.process_time()
                for _ in range(_WORKER_STEPS):
                    trainer.run_step()
                group.barrier()
                seconds = time.process_time() - began  # of all workers, which are threads
                sent[workers] = (group.bytes_sent - before) // _WORKER_STEPS
                return _WORKER_STEPS * settings.batch / seconds

            return run_threads(workers, work)[0]

        figures = interleaved({str(workers): partial(pace, workers) for workers in _WORKERS}, rounds)
        for workers in _WORKERS:
            of = f"ComplEx {_DIM}, {name}, {_workers(workers)}, {sent[workers] / 2**20:.2f} MiB sent by each a step"
            yield compare(of, "triples/CPU s", figures[str(workers)], figures["1"])


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def scheme_rows(
    dims: tuple[int, ...] = _SCHEME_DIMS, negatives: tuple[int, ...] = _SCHEME_NEGATIVES, rounds: int = _SCHEME_ROUNDS
) -> Iterator[Row]:
    """Score-moving, its reference embedding-moving, TransE on two workers."""
    for dim in dims:
        for count in negatives:
            contenders = {scheme: _pace(scheme, dim, count) for scheme in _SCHEMES}
            figures = interleaved(contenders, rounds)
            name = f"score-moving against embedding-moving, dim {dim}, {count} negatives each"
            yield compare(name, "triples/s", figures["score-moving"], figures["embedding-moving"])


def _pace(scheme: str, dim: int, negatives: int) -> Callable[[], float]:
    entities, relations, count = _GRAPHS["WN18RR"]
    triples = workloads.triples(entities, relations, count).astype(np.int32)
    settings = TrainSettings(
        model="TransE", dim=dim, loss="log-sigmoid", negatives=negatives, shared=False, reciprocal=False,
        batch=_SCHEME_BATCH, optimizer="adagrad", scheme=scheme,
    )  # fmt: skip

    def work(group: ReplicaGroup) -> float:
        trainer = GraphTrainer(group, settings, entities, relations, triples)
        trainer.run_step()
        seconds = []
        for _ in range(_SCHEME_STEPS):
            began = time.perf_counter()
            trainer.run_step()
            seconds.append(time.perf_counter() - began)
        return _SCHEME_BATCH / float(np.median(seconds))

    return lambda: run_threads(2, work)[0]


def draw(rows: list[Row], file: Path) -> None:
    """The ratio over negatives, a line for each dimension; above 1 score-moving wins."""
    lines: Mapping[int, list[tuple[int, float]]] = {dim: [] for dim in _SCHEME_DIMS}
    for row in rows:
        words = row.name.replace(",", "").split()
        if row.ratio is not None:
            lines[int(words[4])].append((int(words[5]), row.ratio))
    with drawing(file, "negatives of each triple", "triples/s, score-moving over embedding-moving") as panel:
        for dim, points in lines.items():
            panel.plot(*zip(*points, strict=True), "o-", label=f"dim {dim}")
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)


if __name__ == "__main__":
    main()
