"""The `elastable` command."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from elastable.commands.checkpoint_commands import checkpoint
from elastable.commands.config import config
from elastable.commands.job import REPLICAS_SETTINGS, master, replicas, serve, serve_model, train, worker
from elastable.commands.kg import kg
from elastable.commands.lookup import lookup
from elastable.commands.model_commands import evaluate, export, hold, plan, predict
from elastable.commands.status import status
from elastable.commands.store_commands import log, store
from elastable.embedding_store.errors import BadInput, ElastableError, NotInstalled
from elastable.embedding_store.support.extras import not_installed
from elastable.embedding_store.wire.access.credentials import ENVIRONMENT
from elastable.monitoring.tracing import ENDPOINT_VARIABLES, exporting_traces
from elastable.process.exit_codes import ExitCode, exit_code_of, exit_code_table
from elastable.process.heap import keep_freed_memory
from elastable.process.logs import FORMATS, LEVELS, set_up_logging
from elastable.process.version import distribution_version

_log = logging.getLogger(__name__)
_TRACED = ("train", "master", "worker", "serve", "store")
_VARIABLES = "\n\n".join(f"{name}: {meaning}" for name, meaning in ENVIRONMENT.items())

app = typer.Typer(
    name="elastable",
    help="Train Keras models whose embedding tables live in a store.",
    epilog=f"Exit codes.\n\n{exit_code_table()}\n\nTLS and authentication: variables of files.\n\n{_VARIABLES}",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    add_completion=False,
)
for command in (train, master, worker, serve, serve_model, hold, evaluate, predict, export, plan, status, lookup):
    app.command()(command)
app.command(context_settings=REPLICAS_SETTINGS)(replicas)
app.add_typer(checkpoint)
app.add_typer(log)
app.add_typer(config)
app.add_typer(kg)
app.add_typer(store)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elastable {distribution_version()}")
        raise typer.Exit()


def _known(values: tuple[str, ...]) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in values:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(values)}")
        return value

    return check


@app.callback()
def _options(
    context: typer.Context,
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level",
            callback=_known(LEVELS),
            metavar="|".join(LEVELS),
            envvar="ELASTABLE_LOG_LEVEL",
            help="Least level that is logged. Of workers info, else warning, unless it is set.",
        ),
    ] = None,
    log_format: Annotated[
        str,
        typer.Option(
            "--log-format",
            callback=_known(FORMATS),
            metavar="|".join(FORMATS),
            envvar="ELASTABLE_LOG_FORMAT",
            help="Format of the log on stderr.",
        ),
    ] = "text",
    traces: Annotated[
        str | None,
        typer.Option(
            "--traces",
            metavar="URL",
            envvar=list(ENDPOINT_VARIABLES),
            help="Export traces of train, master, worker, serve and store to an OTLP collector: http://HOST:4317.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.obj is None:  # in another program, which configures logging itself
        return
    if context.invoked_subcommand != "replicas":  # which runs a program of its user's
        os.umask(0o077)  # rows, metrics, logs and models: what a command writes, its owner alone may read
    # Workers that the command starts log likewise.
    os.environ["ELASTABLE_LOG_FORMAT"] = log_format
    if log_level is not None:
        os.environ["ELASTABLE_LOG_LEVEL"] = log_level
    default = "info" if context.invoked_subcommand == "worker" else "warning"
    context.obj(log_level or default, log_format)
    if traces is not None:
        source = context.get_parameter_source("traces")
        _trace(context, traces, source is not None and source.name == "ENVIRONMENT")


def _trace(context: typer.Context, url: str, by_environment: bool) -> None:
    """Traces the command until its end; the workers and store servers that it starts are traced likewise."""
    if context.invoked_subcommand not in _TRACED:
        if by_environment:
            return
        raise BadInput(f"--traces: elastable {context.invoked_subcommand} makes no traces; {', '.join(_TRACED)} do")
    try:
        context.with_resource(exporting_traces(url, f"elastable-{context.invoked_subcommand}"))
    except NotInstalled as error:
        if not by_environment:
            raise
        # The variable is set for all of a platform's processes: that is no reason not to train.
        _log.warning("%s is set, but nothing is traced: %s", " or ".join(ENDPOINT_VARIABLES), error)
    else:
        os.environ[ENDPOINT_VARIABLES[0]] = url


def main() -> None:
    """Runs the command; an `ElastableError` becomes one line and an exit code."""
    keep_freed_memory()
    try:
        app(obj=set_up_logging, prog_name="elastable")
    except (ElastableError, ModuleNotFoundError) as caught:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        error = caught if isinstance(caught, ElastableError) else not_installed(caught, f"elastable {command}")
        if error is None:
            raise
        with suppress(OSError):  # its log may lie on the disk that is full; the exit code tells of it, too
            if os.environ.get("ELASTABLE_LOG_FORMAT") == "json":  # stderr holds nothing but JSON
                _log.error("%s: %s", type(error).__name__, error)
            else:
                line = f"[bold red]{type(error).__name__}[/bold red]: {escape(str(error))}"
                Console(stderr=True).print(line, highlight=False, soft_wrap=True)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
