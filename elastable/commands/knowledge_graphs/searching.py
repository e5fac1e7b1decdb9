"""`elastable kg search`: tries settings, shows a table of the trials, and draws them."""

from __future__ import annotations

import csv
import shlex
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from elastable.commands.command_line import with_options
from elastable.commands.knowledge_graphs.setting_options import CHOSEN, HEADER, MODEL, with_header
from elastable.embedding_store.option import Option, option_fields, required, setting
from elastable.embedding_store.support.extras import needs
from elastable.process.quiet import import_tensorflow
from elastable.process.stopping import SIGNAL_REASONS, OutputConsole, stopping_on_signals

if TYPE_CHECKING:
    import optuna

__all__ = ["search_settings"]

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _SearchOptions:
    dataset: str = required(Option("The graph, as of `elastable kg train`.", metavar="DATASET", positional=True))
    header: str | None = setting(None, HEADER)
    trials: int = setting(20, Option("Trials that the folder has at the end, earlier ones included.", at_least=1))
    search_dir: Path = setting(
        Path("search"), Option("Folder of the search; one that is there goes on.", metavar="DIR")
    )
    space: Path | None = setting(
        None,
        Option(
            "JSON of the settings to try (docs/knowledge-graph-search.md).", metavar="FILE",
            unset="learning rate, dimension, batch, and the regularizer's weight or the negatives",
        ),
    )  # fmt: skip
    workers: int = setting(1, Option("Threads that train a trial.", at_least=1))
    prune: bool = setting(True, Option("End trials that are worse than most after as many evaluations."))


@with_options([*option_fields(_SearchOptions).values(), MODEL, *CHOSEN.values()])
def search_settings(
    dataset: str, header: str | None, trials: int, search_dir: Path, space: Path | None, workers: int, prune: bool,
    model: str,
    **chosen: object,
) -> None:  # fmt: skip
    """Try settings by Optuna; those that you give are the same in every trial. Run again to go on."""
    with needs("elastable kg search", "search"):
        import_tensorflow()
        import optuna

        from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
        from elastable.replicas.knowledge_graphs.search.search import Search
        from elastable.replicas.knowledge_graphs.search.search_space import SearchSpace, default_space

    dataset = with_header(dataset, header)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    fixed = {name: value for name, value in chosen.items() if value is not None}
    tried = default_space(model, fixed) if space is None else SearchSpace.load(space)
    console, stop, reasons = OutputConsole(), threading.Event(), list[str]()
    seed = int(str(fixed.get("seed", 0)))
    search = Search(load_graph(dataset), dataset, model, fixed, tried, search_dir, workers, prune, seed, stop)

    def stopped(reason: str) -> None:
        reasons.append(reason)
        stop.set()

    def tell(trial: optuna.trial.FrozenTrial) -> None:
        console.print(_line(trial), highlight=False, soft_wrap=True)

    with stopping_on_signals(stopped, console, "this step"):
        study = search.run(trials, tell)
    _report(study, search_dir, console)
    if reasons:
        console.print(f"stopped; the same command with --search-dir {shlex.quote(str(search_dir))} goes on")
        raise typer.Exit(next(128 + number for number, reason in SIGNAL_REASONS.items() if reason == reasons[0]))


def _line(trial: optuna.trial.FrozenTrial) -> str:
    outcome = f"MRR {trial.value:.4f}" if trial.value is not None else trial.state.name.lower()
    return f"trial {trial.number}  {outcome}  {_settings(trial)}  {trial.user_attrs.get('error', '')}".rstrip()


def _settings(trial: optuna.trial.FrozenTrial) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in trial.params.items()
    )


def _report(study: optuna.Study, home: Path, console: Console) -> None:
    """Writes `trials.csv` and `search.png`, and shows the best trials."""
    from elastable.output.search_plot import draw_search

    continued = {trial.user_attrs.get("continues") for trial in study.trials}
    trials = [trial for trial in study.trials if trial.state.is_finished() and trial.number not in continued]
    if not trials:
        return
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    with (home / "trials.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", "state", "validation_mrr", *names, "seconds", "run", "error"])
        for trial in trials:
            about = (trial.user_attrs.get(name, "") for name in ("seconds", "home", "error"))
            values = [trial.params.get(name, "") for name in names]
            writer.writerow(
                [trial.number, trial.state.name, "" if trial.value is None else trial.value, *values, *about]
            )
    done = sorted((trial for trial in trials if trial.value is not None), key=lambda trial: -float(trial.value or 0))
    draw_search([(trial.number, float(trial.value or 0), trial.params) for trial in done], home / "search.png")
    table = Table(title=f"{len(trials)} trials", title_justify="left")
    for column in ("trial", "validation MRR", *names):
        table.add_column(column, justify="right")
    for trial in done[:_SHOWN]:
        shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.params.values())
        table.add_row(str(trial.number), f"{trial.value:.4f}", *shown)
    if done:
        table.caption = f"best run: {home / done[0].user_attrs['home']}"
    console.print(table)
