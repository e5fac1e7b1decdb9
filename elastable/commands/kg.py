"""`elastable kg`: models of knowledge graphs, and how they are trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from elastable.commands.command_line import with_options
from elastable.commands.kg_query import (
    classify_triples,
    evaluate_run,
    export_run,
    predict_links,
    score_triples,
)
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, OptionField, option_fields, required, setting
from elastable.embedding_store.support.extras import needs
from elastable.process.quiet import import_backend
from elastable.process.stopping import SIGNAL_REASONS, OutputConsole
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings, default_settings
from elastable.replicas.knowledge_graphs.scores.functions import SCORES


def _default_by_model(field: OptionField) -> OptionField:
    """The option of a setting of `TrainSettings` whose default the model decides."""
    defaults = [default_settings(name).get(field.name, field.default) for name in (_DEFAULT_MODEL, *SCORES)]
    first = defaults[0] if defaults[0] is not None else field.option.unset
    shown = field.words(first)[0] if isinstance(first, bool) else str(first)
    same = all(default == defaults[0] for default in defaults)
    unset = shown if same else f"{shown} for {_DEFAULT_MODEL}; other models differ"
    return replace(field, default=None, option=replace(field.option, unset=unset))


_SETTINGS = dict(option_fields(TrainSettings))
_MODEL: OptionField = _SETTINGS.pop("model")
"""The option `--model`."""

_DEFAULT_MODEL = str(_MODEL.default)
_CHOSEN: Mapping[str, OptionField] = {
    name: _default_by_model(field) for name, field in _SETTINGS.items() if name != "budget_minutes"
}
"""The options of all other settings by name; None: not given. The time is said as --budget."""


kg = typer.Typer(name="kg", help="Train models of knowledge graphs, and query them.", no_args_is_help=True)
for _name, _command in (
    *(("predict", predict_links), ("evaluate", evaluate_run), ("score", score_triples), ("classify", classify_triples)),
    ("export", export_run),
):
    kg.command(_name)(_command)


@dataclass(frozen=True, slots=True)
class _RunOptions:
    dataset: str = required(
        Option(
            "Folder with train.txt, valid.txt, test.txt; or ogb: and a folder.",
            metavar="DATASET", positional=True,
        )
    )  # fmt: skip
    workers: int = setting(
        1, Option("Threads to train on; under `elastable replicas` its -n counts instead.", at_least=1)
    )
    run_dir: Path = setting(Path("runs"), Option("Directory for run directories.", metavar="DIR"))
    resume: Path | None = setting(
        None, Option("Continue from the newest checkpoint of this run, with its settings.", metavar="RUN")
    )
    budget: str | None = setting(
        None,
        Option("Time for the run, such as 40m or 2h: settings are chosen for it, and the run ends with it, tested.",
               metavar="TIME", unset="settings for 40m, and no end"),
    )  # fmt: skip
    checkpoint_minutes: float = setting(
        5.0, Option("Minutes between checkpoints, besides those at evaluations.", above=0, metavar="MINUTES")
    )


@kg.command()
@with_options([*option_fields(_RunOptions).values(), _MODEL, *_CHOSEN.values()])
def train(
    dataset: str, workers: int, run_dir: Path, resume: Path | None, budget: str | None,
    checkpoint_minutes: float, model: str,
    **chosen: object,
) -> None:  # fmt: skip
    """Train a model; the best one by validation is kept and tested. Ctrl-C saves, and says how to continue."""
    with needs("elastable kg", "replicas"):
        import_backend()
        from elastable.commands.kg_train import run_graph
        from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints

    found, notes = None if resume is None else GraphCheckpoints(resume / "checkpoints").newest(), tuple[str, ...]()
    if found is None:
        from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
        from elastable.replicas.knowledge_graphs.graph_settings import planned_settings

        minutes = None if budget is None else _minutes(budget)
        graph = load_graph(dataset)
        settings, notes = planned_settings(model, chosen, len(graph.entities), len(graph.train), minutes)
    else:
        set_anew = [_CHOSEN[name].shown_name for name, value in chosen.items() if value is not None]
        set_anew += ["--budget"] if budget is not None else []
        if set_anew:
            raise BadInput(f"--resume continues with the settings of its run; leave out {', '.join(set_anew)}")
        settings = found.settings
    result = run_graph(dataset, settings, workers, run_dir, OutputConsole(), found, checkpoint_minutes, notes)
    if "stopped" in result:
        raise typer.Exit(_EXIT_CODES[result["stopped"]])


def _minutes(budget: str) -> float:
    """ "40m", "2h", "90s" -> minutes."""
    number, unit = budget[:-1], {"s": 1 / 60, "m": 1.0, "h": 60.0}.get(budget[-1:])
    if unit is None or not number.replace(".", "", 1).isdecimal() or not float(number) > 0:
        raise BadInput(f"--budget {budget!r}: say a time such as 40m, 2h or 90s")
    return float(number) * unit


_EXIT_CODES = {reason: 128 + number for number, reason in SIGNAL_REASONS.items()}
"""As shells report a signal."""
