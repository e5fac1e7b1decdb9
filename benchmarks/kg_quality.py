"""Quality of knowledge-graph models: filtered test MRR, with settings and training time.

    python -m benchmarks.kg_quality [CASE ...]     # codex-s-complex, wn18rr-complex, ...; default: all

The graphs are CoDEx-S and WN18RR, as folders of triples in `ELASTABLE_GRAPHS`
(default `../shared/data`). Settings are the defaults of `elastable kg train`,
except those that a case changes. MRR is the mean over head and tail queries, with
average ranks, including entities not seen in training.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import Row, publish
from elastable.commands.kg_train import run_graph
from elastable.process.heap import keep_freed_memory
from elastable.replicas.knowledge_graphs.training.defaults import settings_of

__all__ = ["CASES", "Case", "main"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model of a graph.

    Attributes:
        graph: Folder of its triples.
        model: Score function.
        floor: Filtered test MRR that it must reach.
        published: What LibKGE publishes.
        changes: Settings that are not the defaults.
        workers: Of the group.
    """

    graph: str
    model: str
    floor: float
    published: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1


CASES = {
    "codex-s-complex": Case("codex-s", "ComplEx", 0.44, 0.465),
    "codex-s-complex-2": Case("codex-s", "ComplEx", 0.44, 0.465, workers=2),
    "codex-s-complex-3": Case("codex-s", "ComplEx", 0.44, 0.465, workers=3),
    "codex-s-complex-4": Case("codex-s", "ComplEx", 0.44, 0.465, workers=4),
    "codex-s-transe": Case("codex-s", "TransE", 0.34, 0.354),
    "wn18rr-complex": Case(
        "wn18rr",
        "ComplEx",
        0.43,
        0.475,
        {"dim": 128, "loss": "softmax", "negatives": 2048, "regularization": 0.1, "evaluate_every": 4},
    ),
}


def main(names: Sequence[str]) -> None:
    """Trains, prints and writes `results/kg_quality.json`."""
    keep_freed_memory()
    home = Path(os.environ.get("ELASTABLE_GRAPHS", Path(__file__).parents[2] / "shared" / "data"))
    console, rows = Console(), []
    for name in names or CASES:
        case = CASES[name]
        settings = settings_of(case.model, case.changes)
        console.print(f"{name}: {json.dumps(settings.as_json())}", highlight=False, soft_wrap=True)
        with tempfile.TemporaryDirectory(prefix="kg-quality-") as runs:
            result = run_graph(str(home / case.graph), settings, case.workers, Path(runs), console)
        mrr = result["metrics"]["mrr"]
        told = f"{result['seconds']:.0f} s, Hits@10 {result['metrics']['hits@10']:.3f}, LibKGE {case.published}"
        workers = "1 worker" if case.workers == 1 else f"{case.workers} workers"
        label = f"{case.model} on {case.graph}, {workers}, {settings.dim} values, {result['epochs']} epochs; {told}"
        rows.append(Row(label, mrr, "test MRR", case.floor, mrr / case.floor, 1.0))
    publish("kg_quality", "Knowledge graphs: quality", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
