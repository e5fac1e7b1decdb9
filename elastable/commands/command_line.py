"""Commands whose options are the fields of a config dataclass."""

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.markup import escape

from elastable.embedding_store.option import Option, OptionField, option_fields
from elastable.process.settings import CONFIG_VARIABLE, load_settings, take_variables, variable_of, words_of
from elastable.process.stopping import OutputConsole, end_without_reader

_CONFIG = "config_file"

AS_JSON = Option("Print JSON.", flags=("--json",))
DEADLINE = Option(
    "Give up on an unreachable server after this time.", flags=("--deadline",), above=0, metavar="SECONDS"
)

Config = TypeVar("Config")


def takes(config: type[Config]) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Makes a command of a function of one config dataclass: the dataclass' fields are the command's options.

    The dataclass checks itself when it is made, before the function runs.
    """

    def decorate(run: Callable[[Config], None]) -> Callable[..., None]:
        def command(**values: object) -> None:
            run(config(**values))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        return with_options(option_fields(config).values())(command)

    return decorate


def with_options(
    options: Iterable[OptionField], settings: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes each of these fields as a keyword argument.

    Each of them may also be set in the file that `--config` names, or in the environment, unless `settings` is False:
    the command line comes before the environment, and that before the file. A group's own function runs only where no
    command of the group follows. One that has a parameter `context` is given typer's. The command's attribute `options`
    holds the fields by name.
    """
    by_name = {each.name: each for each in options}

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def command(context: typer.Context, **values: object) -> None:
            if context.invoked_subcommand is not None:
                return
            if settings:
                values.pop(_CONFIG)
                take_variables(by_name.values())
            given = {name: _value(by_name[name], each) for name, each in values.items()}
            if "context" in inspect.signature(run).parameters:
                given["context"] = context
            try:
                run(**given)
            except BrokenPipeError:  # of standard output: connections have errors of their own
                end_without_reader()

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        parameters = [_parameter(field, settings) for field in by_name.values()]
        if settings:
            parameters.append(_config_parameter(by_name.values()))
        parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
        command.options = by_name  # type: ignore[attr-defined]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(field: OptionField, settings: bool) -> inspect.Parameter:
    """The parameter of a command's function in which typer finds everything about a field."""
    option = field.option
    make: Callable[..., object] = typer.Argument if option.positional else partial(typer.Option, *field.flags)
    info = make(
        help=escape(option.help),
        metavar=_metavar(field),
        envvar=variable_of(field) if settings else None,
        show_envvar=False,
        rich_help_panel=option.group,
        show_default=option.unset or field.default not in (None, ()),
        callback=lambda value: _checked(field, value),
    )
    default = None if field.default == () else field.default
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[_typer_type(field), info],
    )


def _config_parameter(fields: Collection[OptionField]) -> inspect.Parameter:
    """`--config`, which is read before all other options."""

    def load(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None and not context.resilient_parsing:
            root = context.find_root()
            words = context.command_path.split()[len(root.command_path.split()) :]
            found = load_settings(file, words, fields, getattr(root.command, "commands", words))
            by_name = {field.name: field for field in fields}
            context.default_map = {name: words_of(by_name[name], value) for name, value in found.items()}
        return file

    info = typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file of settings, named as the options are.",
        envvar=CONFIG_VARIABLE,
        show_envvar=False,
        is_eager=True,
        callback=load,
    )
    return inspect.Parameter(
        _CONFIG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, info]
    )


def _metavar(field: OptionField) -> str | None:
    """The placeholder of the value in `--help`: "sync|async", "SECONDS>0"; None: its type."""
    option = field.option
    if option.choices:
        return "|".join(option.choices)
    unit = option.metavar or field.kinds[0].__name__.upper()
    if option.at_least is not None:
        return f"{unit}>={option.at_least}"
    return option.metavar if option.above is None else f"{unit}>{option.above}"


def _typer_type(field: OptionField) -> object:
    """The type that typer parses a field's words into."""
    if tuple in field.kinds:
        return list[str] if field.option.positional else str | None
    kind = field.kinds[0]
    return kind | None if field.default is None else kind


def _value(field: OptionField, parsed: object) -> object:
    """The value of a field, from what typer has parsed: "A,B" -> ("A", "B")."""
    if tuple not in field.kinds:
        return parsed
    if isinstance(parsed, list):
        return tuple(parsed)
    return tuple(name.strip() for name in str(parsed or "").split(",") if name.strip())


def wide_console() -> OutputConsole:
    """For tables: wide where it is no terminal, whose lines would be cut."""
    console = OutputConsole()
    return console if console.is_terminal else OutputConsole(width=200)


def _checked(field: OptionField, parsed: object) -> object:
    if not field.accepts(_value(field, parsed)):
        raise typer.BadParameter(f"{parsed} {field.wanted}")
    return parsed
