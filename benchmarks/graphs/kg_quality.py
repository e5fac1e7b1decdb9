"""Quality of knowledge-graph models: filtered MRR, with settings and training time.

    python -m benchmarks.graphs.kg_quality [CASE ...]     # codex-s-complex, ...; default: all but the budgets
    python -m benchmarks.graphs.kg_quality budgets        # FB15k-237, CoDEx-M, WN18RR, 40 minutes each, on quiet cores
    python -m benchmarks.graphs.kg_quality drawn          # drawn graphs of the sizes of FB15k-237 and CoDEx-M

The graphs are folders of triples in `ELASTABLE_GRAPHS` (default `../shared/data`); a case whose graph is not there says
so. Settings are the defaults of `elastable kg train`, except those that a case changes, for some by the published ones
of `examples/knowledge_graphs`; a case with a budget takes what `--budget` chooses for it. MRR is the mean over head and
tail queries, with average ranks, including entities not seen in training: of the test triples, and in the cases with a
budget of the validation triples. On a drawn graph it is compared with that of the model that the graph was drawn from.
`ELASTABLE_BUDGET=5m` shortens the budgets; `ELASTABLE_CLOCK=processor` counts them in processor seconds divided by the
number of cores, which other processes on the machine change little.
"""

import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.graphs.kg_drawn import DRAWN, HiddenModel, drawn_graph
from benchmarks.harness import Row, publish
from elastable.commands.kg_train import run_graph
from elastable.embedding_store.native.range_pool import available_cores
from elastable.process.heap import keep_freed_memory
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph, save_graph
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings, planned_settings, settings_of


@dataclass(frozen=True, slots=True)
class Case:
    """A model of a graph.

    Attributes:
        graph: Folder of its triples, or name of a size to draw one of (`kg_drawn.DRAWN`).
        model: Score function.
        floor: Filtered MRR that it must reach: of the test triples, with a budget of the validation triples. On a drawn
            graph the share of its bound.
        published: What LibKGE publishes; None for a drawn graph.
        changes: Settings that are not the defaults.
        workers: Of the group.
        budget_minutes: Time for the run, from which its settings are chosen; None: the defaults, and no end.
    """

    graph: str
    model: str
    floor: float | None
    published: float | None
    changes: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    budget_minutes: float | None = None


def _published(graph: str) -> dict[str, Any]:
    """The settings of a published graph."""
    file = Path(__file__).parents[2] / "examples" / "knowledge_graphs" / f"{graph}.toml"
    settings: dict[str, Any] = tomllib.loads(file.read_text())["kg"]["train"]
    return {name: value for name, value in settings.items() if name != "model"}


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
        {**_published("wn18rr"), "dim": 128, "loss": "softmax", "negatives": 2048, "evaluate_every": 4},
    ),
    "fb15k-237-budget": Case("fb15k-237", "ComplEx", 0.33, 0.348, _published("fb15k-237"), budget_minutes=40.0),
    "codex-m-budget": Case("codex-m", "ComplEx", 0.31, 0.337, _published("codex-m"), budget_minutes=40.0),
    "wn18rr-budget": Case("wn18rr", "ComplEx", 0.44, 0.475, _published("wn18rr"), budget_minutes=40.0),
    **{
        name: Case(name, "ComplEx", None, None, _published(name.removesuffix("-drawn")), budget_minutes=40.0)
        for name in DRAWN
    },
}
_DRAWN = tuple(DRAWN)
_BUDGETS = tuple(name for name, case in CASES.items() if case.budget_minutes is not None and name not in DRAWN)
_SETS = {"kg_budgets": _BUDGETS, "kg_drawn": _DRAWN}
_SEED = 0  # of drawn graphs


def main(names: Sequence[str]) -> None:
    """Trains, prints and writes `results/kg_quality.json`, or `results/kg_budgets.json` and `kg_drawn.json`."""
    keep_freed_memory()
    home = Path(os.environ.get("ELASTABLE_GRAPHS", Path(__file__).parents[3] / "shared" / "data"))
    bench = f"kg_{names[0]}" if len(names) == 1 else ""
    usual = [name for name in CASES if name not in (*_BUDGETS, *_DRAWN)]
    rows = [_row(name, CASES[name], home, Console()) for name in _SETS.get(bench, names or usual)]
    publish(bench if bench in _SETS else "kg_quality", "Knowledge graphs: quality", rows)


def _row(name: str, case: Case, home: Path, console: Console) -> Row:
    if case.graph in DRAWN:
        with tempfile.TemporaryDirectory(prefix="kg-drawn-") as folder:
            hidden = HiddenModel(DRAWN[case.graph], _SEED)
            graph = drawn_graph(hidden, _SEED)
            save_graph(graph, Path(folder) / case.graph)
            mrr, label = _trained(name, case, Path(folder), console)
            bound = hidden.mrr(graph)
        return Row(label, mrr, "validation MRR", bound, mrr / bound, case.floor)
    unit = "test MRR" if case.budget_minutes is None else "validation MRR"
    if not (home / case.graph).is_dir():
        absent = f"absent: no folder {case.graph} in ELASTABLE_GRAPHS"
        return Row(f"{case.model} on {case.graph}", None, unit, case.floor, None, 1.0, absent)
    mrr, label = _trained(name, case, home, console)
    return Row(label, mrr, unit, case.floor, mrr / (case.floor or 1.0), 1.0)


def _trained(name: str, case: Case, home: Path, console: Console) -> tuple[float, str]:
    """The MRR of a case's model, and what was trained in what time."""
    settings, notes = _settings(case, home / case.graph)
    console.print(f"{name}: {json.dumps(settings.as_json())}", highlight=False, soft_wrap=True)
    by_processor, began = os.environ.get("ELASTABLE_CLOCK") == "processor", time.process_time()
    clock = _processor_clock if by_processor else time.monotonic
    with tempfile.TemporaryDirectory(prefix="kg-quality-") as runs:
        source = str(home / case.graph)
        result = run_graph(source, settings, case.workers, Path(runs), console, notes=notes, clock=clock)
    metrics, spent = result["metrics"], time.process_time() - began
    summary = f"{result['seconds']:.0f} s, {spent:.0f} CPU s, {result['split']} MRR {metrics['mrr']:.4f}, "
    summary += f"Hits@10 {metrics['hits@10']:.3f}"
    summary += f", LibKGE {case.published}" if case.published else ""
    workers = "1 worker" if case.workers == 1 else f"{case.workers} workers"
    minutes = f"{_minutes(case):g} min{' by processor time' if by_processor else ''}"
    budget = f", budget {minutes}" if case.budget_minutes is not None else ""
    label = (
        f"{case.model} on {case.graph}, {workers}, {settings.dim} values, {result['epochs']} epochs{budget}; " + summary
    )
    return metrics["mrr"] if case.budget_minutes is None else result["best_validation_mrr"], label


def _processor_clock() -> float:
    """Seconds in which this machine's cores, all busy for this process alone, would have done what it has done."""
    return time.process_time() / available_cores()


def _settings(case: Case, folder: Path) -> tuple[TrainSettings, tuple[str, ...]]:
    if case.budget_minutes is None:
        return settings_of(case.model, case.changes), ()
    graph = load_graph(folder)
    return planned_settings(case.model, case.changes, len(graph.entities), len(graph.train), _minutes(case))


def _minutes(case: Case) -> float:
    shorter = os.environ.get("ELASTABLE_BUDGET", "")
    return float(shorter.removesuffix("m")) if shorter else case.budget_minutes or 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
