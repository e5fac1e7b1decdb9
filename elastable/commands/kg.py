"""`elastable kg train` and `elastable kg predict`: models of knowledge graphs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes, with_options
from elastable.commands.knowledge_graphs.evaluating import classify_triples, evaluate_run, score_triples
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, OptionField, option_fields, required, setting
from elastable.embedding_store.support.extras import needs
from elastable.process.quiet import import_tensorflow
from elastable.process.stopping import SIGNAL_REASONS
from elastable.replicas.knowledge_graphs.scores import SCORES
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from elastable.replicas.knowledge_graphs.training.defaults import default_settings, settings_of

__all__ = ["kg"]

kg = typer.Typer(name="kg", help="Train models of knowledge graphs, and query them.", no_args_is_help=True)
kg.command("evaluate")(evaluate_run)
kg.command("score")(score_triples)
kg.command("classify")(classify_triples)


@dataclass(frozen=True, slots=True)
class _RunOptions:
    dataset: str = required(
        Option(
            "Folder with train.txt, valid.txt and test.txt, or the name of an installed graph such as umls.",
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
    checkpoint_minutes: float = setting(
        5.0, Option("Minutes between checkpoints, besides those at evaluations.", above=0, metavar="MINUTES")
    )


def _default_by_model(field: OptionField) -> OptionField:
    """The option of a setting of `TrainSettings` whose default the model decides."""
    defaults = [default_settings(name).get(field.name, field.default) for name in (_DEFAULT_MODEL, *SCORES)]
    first = defaults[0] if defaults[0] is not None else field.option.unset
    shown = field.words(first)[0] if isinstance(first, bool) else str(first)
    same = all(default == defaults[0] for default in defaults)
    unset = shown if same else f"{shown} for {_DEFAULT_MODEL}; other models differ"
    return replace(field, default=None, option=replace(field.option, unset=unset))


_SETTINGS = dict(option_fields(TrainSettings))
_MODEL = _SETTINGS.pop("model")
_DEFAULT_MODEL = str(_MODEL.default)
_CHOSEN = {name: _default_by_model(field) for name, field in _SETTINGS.items()}


@kg.command()
@with_options([*option_fields(_RunOptions).values(), _MODEL, *_CHOSEN.values()])
def train(
    dataset: str, workers: int, run_dir: Path, resume: Path | None, checkpoint_minutes: float, model: str,
    **chosen: object,
) -> None:  # fmt: skip
    """Train a model; the best one by validation is kept and tested. Ctrl-C saves, and says how to continue."""
    with needs("elastable kg", "replicas"):
        import_tensorflow()
        from elastable.commands.kg_train import newest_checkpoint_of, run_graph

    found = None if resume is None else newest_checkpoint_of(resume)
    if found is None:
        settings = settings_of(model, chosen)
    else:
        set_anew = [_CHOSEN[name].shown_name for name, value in chosen.items() if value is not None]
        if set_anew:
            raise BadInput(f"--resume continues with the settings of its run; leave out {', '.join(set_anew)}")
        settings = found.settings
    result = run_graph(dataset, settings, workers, run_dir, Console(), found, checkpoint_minutes)
    if "stopped" in result:
        raise typer.Exit(_EXIT_CODES[result["stopped"]])


_EXIT_CODES = {reason: 128 + number for number, reason in SIGNAL_REASONS.items()}
"""As shells report a signal."""


@dataclass(frozen=True, slots=True)
class _PredictOptions:
    run: Path = required(Option("A run directory of `elastable kg train`.", metavar="RUN", positional=True))
    relation: str = required(Option("Name of the relation."))
    head: str | None = setting(None, Option("Name of the head; asks for tails."))
    tail: str | None = setting(None, Option("Name of the tail; asks for heads."))
    top: int = setting(10, Option("Number of answers.", flags=("--top", "-k"), at_least=1))
    new: bool = setting(False, Option("Leave out triples that the graph already has."))
    as_json: bool = setting(False, AS_JSON)


@kg.command()
@takes(_PredictOptions)
def predict(options: _PredictOptions) -> None:
    """Answer (head, relation, ?) or (?, relation, tail)."""
    with needs("elastable kg", "replicas"):
        import_tensorflow()
        from elastable.replicas.knowledge_graphs.training.link_predictor import LinkPredictor

    head, tail = options.head, options.tail
    answers = LinkPredictor(options.run).answers(options.relation, head=head, tail=tail, k=options.top, new=options.new)
    if options.as_json:
        typer.echo(json.dumps([{"entity": answer.entity, "score": answer.score} for answer in answers]))
        return
    table = Table(title=f"({head or '?'}, {options.relation}, {tail or '?'})", title_justify="left")
    for column in ("", "entity", "score"):
        table.add_column(column, justify="left" if column == "entity" else "right")
    for rank, answer in enumerate(answers, start=1):
        table.add_row(str(rank), answer.entity, f"{answer.score:.4f}")
    Console().print(table)
