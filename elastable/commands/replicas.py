"""`elastable replicas`: a program in several processes that exchange arrays with each other."""

from __future__ import annotations

from typing import Annotated

import typer

from elastable.embedding_store.errors import BadInput

__all__ = ["REPLICAS_SETTINGS", "replicas"]

REPLICAS_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Of click: what follows the program is the program's."""


def replicas(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM [ARGS]...", help="A Python file, -m MODULE, or elastable COMMAND; with its arguments."
        ),
    ],
    count: Annotated[int, typer.Option("-n", min=1, help="How many processes.")],
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline", metavar="SECONDS", help="Time after which a process that others wait for counts as failed."
        ),
    ] = 60.0,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="HOST[:COUNT],...", help="Hosts to run on, by ssh \\[default: this one]."),
    ] = None,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", help="Time for the others to end after one has failed."),
    ] = 5.0,
) -> None:
    """Run a program in several processes; et.replica_group() joins them. All end when one fails."""
    from elastable.launch.launch import Launch
    from elastable.launch.program import Program

    if not deadline > 0 or not grace >= 0:
        raise BadInput(f"--deadline {deadline:g} --grace {grace:g}: seconds, above 0 and at least 0")
    Launch(count, Program.of(words), deadline, hosts, grace).run()
