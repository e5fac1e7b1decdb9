"""`elastable config show`: the options that a file and the environment give a command."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from elastable.commands.command_line import AS_JSON, with_options
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, OptionField, option_fields, required, setting
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.process.settings import CONFIG_VARIABLE, key_of, load_settings, variable_of
from elastable.process.stopping import OutputConsole

config = typer.Typer(
    name="config", help="Settings of commands from files and variables.", no_args_is_help=True, add_completion=False
)


@config.callback()
def _config() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _ShownOptions:
    command: tuple[str, ...] = required(
        Option("The command: train, worker, kg train.", metavar="COMMAND...", positional=True)
    )
    config: Path | None = setting(None, Option("TOML file of settings.", metavar="FILE"))
    as_json: bool = setting(False, AS_JSON)


@config.command()
@with_options(option_fields(_ShownOptions).values(), settings=False)
def show(context: typer.Context, command: tuple[str, ...], config: Path | None, as_json: bool) -> None:
    """Show every setting of a command, its value without a command line, and where that comes from."""
    root = context.find_root().command
    fields = _fields(root, command)
    named = os.environ.get(CONFIG_VARIABLE) if config is None else str(config)
    file = Path(named) if named else None
    from_file = {} if file is None else load_settings(file, command, fields, getattr(root, "commands", {}))
    rows = [_row(field, from_file, file) for field in fields]
    if as_json:
        typer.echo(json.dumps({key: {"value": value, "from": source} for key, value, source in rows}, indent=2))
        return
    table = Table("setting", "value", "from", title=escape(f"elastable {' '.join(command)}"), title_justify="left")
    for key, value, source in rows:
        table.add_row(key, "" if value is None else escape(str(value)), escape(source))
    OutputConsole().print(table)


def _fields(found: object, command: Sequence[str]) -> list[OptionField]:
    for word in command:
        found = getattr(found, "commands", {}).get(word)
    options: Mapping[str, OptionField] | None = getattr(getattr(found, "callback", None), "options", None)
    if options is None:
        raise BadInput(f"elastable {' '.join(command)} is no command with settings")
    return list(options.values())


def _row(field: OptionField, from_file: Mapping[str, object], file: Path | None) -> tuple[str, object, str]:
    variable = variable_of(field)
    value: object
    if os.environ.get(variable):
        value, source = os.environ[variable], variable
    elif field.name in from_file:
        value, source = from_file[field.name], str(file)
    else:
        value, source = (None, "to be given") if field.default is MISSING else (field.default, "default")
    if isinstance(value, tuple | Path):
        value = list(value) if isinstance(value, tuple) else str(value)
    return key_of(field), redacted(value) if isinstance(value, str) and "://" in value else value, source
