"""Knowledge graphs: bytes exchanged per step by number of workers, compared with the formula; time to compute batches.

A step is 1,024 triples of all workers together, ComplEx of dimension 128,
candidates for tails. Bytes are those that a worker sends to others, counted by
the group, forward and backward; every worker must send the same number.

    python -m benchmarks.graphs.kg_balance
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.harness import RESULTS, Row, Work, drawing, publish, versus
from elastable.embedding_store.contract.arrays import Float32, Int32
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding
from elastable.replicas.knowledge_graphs.losses import Loss
from elastable.replicas.knowledge_graphs.samplers import RandomNegatives, RigidSampler, TypedNegatives
from elastable.replicas.knowledge_graphs.schemes import CandidateScheme, EmbeddingMoving, ScoreMoving
from elastable.replicas.knowledge_graphs.scores.functions import score_function

_ENTITIES, _RELATIONS, _TRIPLES = 40_943, 11, 86_835  # WN18RR's sizes, triples at random
_STEP, _DIM, _WORKERS, _ROUNDS = 1024, 128, (1, 2, 3, 4, 6, 8), 5
_LOSS = Loss("softmax")
_WIDTH = 4 * _DIM  # bytes of an embedding, and of a query


@dataclass(frozen=True)
class _Way:
    """One scheme with one kind of candidates.

    Attributes:
        name: For people.
        scheme: Which.
        shared: Whether the triples of a step share candidates.
        candidates: Of a triple, from all shards.
    """

    name: str
    scheme: type[CandidateScheme]
    shared: bool
    candidates: int

    def sizes(self, workers: float) -> tuple[float, float]:
        """Triples of each shardpair, and candidates from each shard."""
        return _STEP / workers**2, self.candidates / workers

    def formula(self, workers: float, sizes: tuple[float, float] | None = None) -> float:
        """Bytes that a worker sends in a step, forward and backward: see `knowledge_graphs.schemes`."""
        p, m = sizes or self.sizes(workers)
        own, others = workers * p, workers - 1
        if self.scheme is EmbeddingMoving:
            return 2 * others * _WIDTH * (p + (m if self.shared else own * m))
        return 2 * others * (_WIDTH * p + _WIDTH * own + 4 * own * m)


_WAYS = (
    _Way("embedding-moving, 64 a triple", EmbeddingMoving, False, 64),
    _Way("score-moving, 64 a triple", ScoreMoving, False, 64),
    _Way("embedding-moving, 1,024 shared", EmbeddingMoving, True, 1024),
    _Way("score-moving, 1,024 shared", ScoreMoving, True, 1024),
)


def main() -> None:
    """Measures, prints, and writes `results/kg_balance.json` and its plot."""
    rows = measured()
    publish("kg_balance", "Knowledge graphs: bytes of a step against the formula, and batches", rows)
    drawn(rows, RESULTS / "kg_balance.svg")


def measured() -> list[Row]:
    """The rows of the table."""
    triples = _random_triples()
    return [*(_bytes_sent(triples, way, workers) for way in _WAYS for workers in _WORKERS), *_batches(triples)]


def drawn(rows: list[Row], file: Path) -> None:
    """Draws measured bytes as points on the lines of the formula, an SVG."""
    along = np.linspace(min(_WORKERS), max(_WORKERS), 200)
    axes = "workers, for the same 1,024 triples a step", "MiB that a worker sends in a step"
    with drawing(file, *axes, size=(7, 4.2)) as panel:
        panel.set_title("Points: measured. Lines: the formula (points above them: blocks rounded up).", fontsize=10)
        for way in _WAYS:
            line = panel.plot(along, [way.formula(workers) / 2**20 for workers in along], linewidth=1.4)[0]
            found = [row.value or 0.0 for row in rows if row.name.endswith(f"{way.name}, MiB a worker sends")]
            panel.plot(_WORKERS, found, "o", color=line.get_color(), label=way.name)


def _random_triples() -> Int32:
    random = np.random.default_rng(2026)
    columns = [random.integers(high, size=_TRIPLES) for high in (_ENTITIES, _RELATIONS, _ENTITIES)]
    return np.stack(columns, axis=1).astype(np.int32)


def _bytes_sent(triples: Int32, way: _Way, workers: int) -> Row:
    sharding = Sharding.create(_ENTITIES, workers)
    partition = PartitionedTriples.create(triples, sharding)
    negatives = RandomNegatives(sharding, -(-way.candidates // workers), corruption="t", shared=way.shared)
    sampler = RigidSampler(partition, _STEP // workers, negatives=negatives)
    score = score_function("ComplEx", _DIM)
    relations = np.ones((_RELATIONS, score.relation_width), np.float32)

    def step(group: ReplicaGroup) -> int:
        scheme = way.scheme(group, score, _LOSS)
        scored = scheme.forward(sampler.batch(0, group.rank), _shard(sharding, score.entity_width), relations)
        scored.backward(np.ones_like(scored.positive), np.ones_like(scored.negative))
        return group.bytes_sent

    sent = run_threads(workers, step)
    if len(set(sent)) > 1:
        raise RuntimeError(f"{way.name}, {workers} workers send {sent} bytes: not balanced")
    expected = way.formula(workers, (sampler.block, negatives.count))
    ratio = sent[0] / expected if expected else 1.0
    name = f"{workers} workers, {way.name}, MiB a worker sends"
    return Row(name, sent[0] / 2**20, "MiB", expected / 2**20, ratio, floor=1.0)


def _shard(sharding: Sharding, width: int) -> Float32:
    return np.ones((sharding.rows, width), np.float32)


def _batches(triples: Int32) -> Iterator[Row]:
    """Triples/s of computing one worker's batches, compared with scoring them and their gradients."""
    sharding = Sharding.create(_ENTITIES, 1, entity_types=np.arange(_ENTITIES) % 7)
    partition = PartitionedTriples.create(triples, sharding)
    known = KnownTriples.create(_ENTITIES, _RELATIONS, triples)
    kinds = {
        "256 shared candidates": RandomNegatives(sharding, 256, corruption="t", shared=True),
        "256 candidates a triple": RandomNegatives(sharding, 256, corruption="t"),
        "256 a triple, by type": TypedNegatives(sharding, 256, corruption="t"),
        "256 a triple, known ones masked": RandomNegatives(sharding, 256, corruption="t", known=known),
    }
    for name, negatives in kinds.items():
        sampler = RigidSampler(partition, _STEP, negatives=negatives)
        made = partial(_make, sampler, count())
        of = f"batches with {name}, against score and gradients"
        yield versus(of, "triples/s", made, _scoring(sampler, sharding), _STEP, _ROUNDS)


def _make(sampler: RigidSampler, steps: Iterator[int]) -> None:
    sampler.batch(next(steps), 0)


def _scoring(sampler: RigidSampler, sharding: Sharding) -> Work:
    score = score_function("ComplEx", _DIM)
    entities, relations = _shard(sharding, score.entity_width), np.ones((_RELATIONS, score.relation_width), np.float32)
    scheme, batch = EmbeddingMoving(alone(), score, _LOSS), sampler.batch(0, 0)

    def step() -> None:
        scored = scheme.forward(batch, entities, relations)
        scored.backward(scored.positive, scored.negative)

    return step


if __name__ == "__main__":
    main()
