"""Knowledge graphs: triples per second compared with PyKEEN's; score-moving compared with embedding-moving.

PyKEEN trains the same model with the same dimension, negatives per triple, batch
and optimizer (Adam), on random graphs of the sizes of CoDEx-S and WN18RR; both
run on two threads and take turns. PyKEEN runs in a separate environment in
`.peers/` (`make bench-peers` creates it).

Schemes: two workers (threads) with candidates for each triple, with growing
numbers of candidates and dimensions; the plot shows where score-moving wins.

    python -m benchmarks.kg
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.harness import RESULTS, Row, compare, interleaved, publish
from benchmarks.peers import workloads
from benchmarks.peers.environments import OURS, PYKEEN
from benchmarks.peers.races import Pairing, Race, Runner, run
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.settings import TrainSettings

__all__ = ["main", "peer_rows", "scheme_rows"]

_FLOOR = 3.0
_GRAPHS = {"CoDEx-S": (2_034, 42, 32_888), "WN18RR": (40_943, 11, 86_835)}
"""Sizes: entities, relations, triples."""

_DIM, _NEGATIVES, _BATCH = 128, 64, 512
_MODELS = ("TransE", "RotatE", "DistMult", "ComplEx")
_SIDES = "benchmarks.peers.sides"

_SCHEMES = ("score-moving", "embedding-moving")
_SCHEME_DIMS, _SCHEME_NEGATIVES = (32, 128, 512), (2, 8, 32, 128)
_SCHEME_BATCH, _SCHEME_STEPS, _SCHEME_ROUNDS = 256, 5, 5


def main() -> None:
    """Measures, prints, and writes `results/kg.json` and the picture of the crossover."""
    schemes = list(scheme_rows())
    publish("kg", "Knowledge graphs: Elastable vs. PyKEEN, score-moving vs. embedding-moving", peer_rows() + schemes)
    draw(schemes, RESULTS / "kg_schemes.png")


def peer_rows(rounds: int = 5, seconds: float = 1.0) -> list[Row]:
    """Triples per second, compared with PyKEEN's."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kg-") as home:
        for graph, (entities, relations, triples) in _GRAPHS.items():
            settings = {
                "entities": entities,
                "relations": relations,
                "triples": triples,
                "dim": _DIM,
                "negatives": _NEGATIVES,
                "batch": _BATCH,
            }
            for model in _MODELS:
                runners = (
                    Runner("elastable", OURS, f"{_SIDES}.elastable_triples", model),
                    Runner("pykeen", PYKEEN, f"{_SIDES}.pykeen_triples", model),
                )
                name = f"{model} {_DIM}, {_NEGATIVES} negatives each, {graph}'s size, against PyKEEN"
                race = Race("triples/s", runners, (Pairing(name, "elastable", "pykeen", _FLOOR),), settings)
                rows += run(race, Path(home), rounds, seconds)
    return rows


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 4))
    lines: Mapping[int, list[tuple[int, float]]] = {dim: [] for dim in _SCHEME_DIMS}
    for row in rows:
        words = row.name.replace(",", "").split()
        if row.ratio is not None:
            lines[int(words[4])].append((int(words[5]), row.ratio))
    for dim, points in lines.items():
        panel.plot(*zip(*points, strict=True), "o-", label=f"dim {dim}")
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xlabel("negatives of each triple")
    panel.set_ylabel("triples/s, score-moving over embedding-moving")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.tight_layout()
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
