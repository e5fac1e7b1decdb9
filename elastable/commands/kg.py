"""`elastable kg train` and `elastable kg predict`: models of knowledge graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.extras import needs
from elastable.process.quiet import import_tensorflow

__all__ = ["kg"]

kg = typer.Typer(name="kg", help="Train models of knowledge graphs, and ask them.", no_args_is_help=True)

_MODEL, _PLACES = "The model", "Where things go"


@kg.command()
def train(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="Folder with train.txt, valid.txt, test.txt; or umls, ...")
    ],
    model: Annotated[str, typer.Option("--model", help="TransE, RotatE, DistMult, ComplEx, ...")] = "ComplEx",
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Threads here; under `elastable replicas` its -n counts.")
    ] = 1,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Epochs at most.")] = None,
    dim: Annotated[int | None, typer.Option("--dim", min=1, rich_help_panel=_MODEL)] = None,
    norm: Annotated[
        int | None, typer.Option("--norm", help="Norm of distances: 1 or 2.", rich_help_panel=_MODEL)
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option("--loss", help="Loss: whole-softmax, log-sigmoid, margin or softmax.", rich_help_panel=_MODEL),
    ] = None,
    margin: Annotated[float | None, typer.Option("--margin", rich_help_panel=_MODEL)] = None,
    adversarial: Annotated[
        float | None,
        typer.Option(
            "--adversarial", help="Temperature of self-adversarial weights of negatives.", rich_help_panel=_MODEL
        ),
    ] = None,
    negatives: Annotated[
        int | None,
        typer.Option("--negatives", min=1, help="Negatives sampled for each triple.", rich_help_panel=_MODEL),
    ] = None,
    shared: Annotated[bool | None, typer.Option("--shared/--per-triple", rich_help_panel=_MODEL)] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            "--candidates",
            help="Where negatives come from: random, or typed (same entity type).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    corruption: Annotated[
        str | None,
        typer.Option("--corruption", help="Which end of a triple is replaced: h, t or ht.", rich_help_panel=_MODEL),
    ] = None,
    filtered: Annotated[
        bool | None,
        typer.Option(
            "--filtered/--unfiltered", help="Leave true triples out of the negatives.", rich_help_panel=_MODEL
        ),
    ] = None,
    reciprocal: Annotated[bool | None, typer.Option("--reciprocal/--no-reciprocal", rich_help_panel=_MODEL)] = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Scheme: score-moving or embedding-moving.", rich_help_panel=_MODEL)
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Triples in a step, over all workers.")] = None,
    sampling: Annotated[
        str | None, typer.Option("--sampling", help="rigid: each triple once an epoch; random: with replacement.")
    ] = None,
    weighting: Annotated[
        str | None, typer.Option("--weighting", help="Weights of triples: equal or frequency.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="A fused one: adagrad, adam, ...")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate")] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="Learning-rate schedule: constant, linear or cosine.")
    ] = None,
    regularizer: Annotated[str | None, typer.Option("--regularizer", help="Regularizer: none, l2 or n3.")] = None,
    regularization: Annotated[float | None, typer.Option("--regularization", help="Weight of the regularizer.")] = None,
    patience: Annotated[
        int | None, typer.Option("--patience", min=0, help="Evaluations without a better one; 0: never stop early.")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option("--evaluate-every", min=1, metavar="EPOCHS")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Directory for run directories.", rich_help_panel=_PLACES)
    ] = Path("runs"),
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Go on from this run's newest checkpoint, with its settings.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
) -> None:
    """Train a model; the best one by validation is kept and tested."""
    with needs("elastable kg", "replicas"):
        import_tensorflow()
        from elastable.commands.kg_train import run_graph, to_go_on
        from elastable.replicas.knowledge_graphs.training.defaults import settings_of

    given = {
        "epochs": epochs, "dim": dim, "norm": norm, "loss": loss, "margin": margin, "adversarial": adversarial,
        "negatives": negatives, "shared": shared, "candidates": candidates, "corruption": corruption,
        "filtered": filtered, "reciprocal": reciprocal, "scheme": scheme, "batch": batch,
        "sampling": sampling, "weighting": weighting,
        "optimizer": optimizer, "learning_rate": learning_rate, "schedule": schedule, "regularizer": regularizer,
        "regularization": regularization, "patience": patience, "evaluate_every": evaluate_every, "seed": seed,
    }  # fmt: skip
    begin = None if resume is None else to_go_on(resume)
    if begin is not None:
        other = [name for name, value in given.items() if value is not None]
        if other:
            raise BadInput(f"--resume goes on with the settings of its run; leave out {', '.join(other)}")
    settings = settings_of(model, given) if begin is None else begin.settings
    run_graph(dataset, settings, workers, run_dir, Console(), begin)


@kg.command()
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of `elastable kg train`.")],
    relation: Annotated[str, typer.Option("--relation", help="Name of the relation.")],
    head: Annotated[str | None, typer.Option("--head", help="Name of the head; asks for tails.")] = None,
    tail: Annotated[str | None, typer.Option("--tail", help="Name of the tail; asks for heads.")] = None,
    k: Annotated[int, typer.Option("--top", "-k", min=1, help="How many answers.")] = 10,
    new: Annotated[bool, typer.Option("--new", help="Leave out triples that the graph already has.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Answer (head, relation, ?) or (?, relation, tail)."""
    with needs("elastable kg", "replicas"):
        import_tensorflow()
        from elastable.replicas.knowledge_graphs.training.link_predictor import LinkPredictor

    answers = LinkPredictor(run).answers(relation, head=head, tail=tail, k=k, new=new)
    if as_json:
        typer.echo(json.dumps([{"entity": answer.entity, "score": answer.score} for answer in answers]))
        return
    table = Table(title=f"({head or '?'}, {relation}, {tail or '?'})", title_justify="left")
    for column in ("", "entity", "score"):
        table.add_column(column, justify="left" if column == "entity" else "right")
    for place, answer in enumerate(answers, start=1):
        table.add_row(str(place), answer.entity, f"{answer.score:.4f}")
    Console().print(table)
