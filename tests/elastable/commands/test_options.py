"""Every option of every command has one definition: its help, default, bounds and forwarding come from it."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from elastable.command import app
from elastable.commands.command_line import takes
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import (
    Option,
    OptionField,
    check_options,
    command_words,
    option_fields,
    required,
    setting,
)
from elastable.jobs.options import JobOptions, ServerOptions, TrainOptions, WorkerOptions
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from tests.untyped import Keywords

ROOT = Path(__file__).parents[3]
WIDE = {"COLUMNS": "400"}


def _commands(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, below in inner.items():
        yield from _commands(below, (*path, name))


COMMANDS = dict(_commands(typer.main.get_command(app)))
every_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def _options(path: tuple[str, ...]) -> list[tuple[Any, OptionField]]:
    """The parameters of a command, each with its definition."""
    command = COMMANDS[path]
    return [
        (parameter, command.callback.options[parameter.name])
        for parameter in command.params
        if parameter.name not in ("help", "config_file")
    ]


def _wrong_value(field: OptionField) -> str | None:
    """A value that the definition does not allow; None: it allows all."""
    if field.option.choices:
        return "unheard-of"
    if field.option.at_least is not None:
        return str(field.kinds[0](field.option.at_least - 1))
    return None if field.option.above is None else str(float(field.option.above))


def test_there_are_the_options_of_all_commands() -> None:
    assert len(COMMANDS) >= 18
    assert sum(len(_options(path)) for path in COMMANDS) > 120


@every_command
def test_help_and_default_are_those_defined(path: tuple[str, ...]) -> None:
    shown = " ".join(CliRunner().invoke(app, [*path, "--help"], env=WIDE).output.replace("│", " ").split())
    for parameter, field in _options(path):
        option = field.option
        assert parameter.help.replace("\\[", "[") == option.help
        assert option.help[0].isupper() or option.help.split()[0] in (*option.choices, "memory,")
        assert option.help.endswith("."), "a sentence"
        assert parameter.required is (field.default is MISSING)
        assert parameter.default == (None if field.default in (MISSING, ()) else field.default)
        if not option.positional:
            names = {name for flags in field.flags for name in flags.split("/")}
            assert set(parameter.opts + parameter.secondary_opts) == names
        assert " ".join(option.help.split()) in shown
        if option.unset:
            assert f"[default: ({option.unset})]" in shown


@every_command
def test_a_wrong_value_is_refused_by_the_typed_name(path: tuple[str, ...]) -> None:
    for parameter, field in _options(path):
        wrong = _wrong_value(field)
        if wrong is None:
            assert not field.option.choices
            continue
        for name in field.flags:
            ran = CliRunner().invoke(app, [*path, name, wrong], env=WIDE)
            assert ran.exit_code == 2
            shown = parameter.get_error_hint()
            assert f"Invalid value for {shown}: {wrong} {field.wanted}" in ran.output
            assert name in shown


def test_no_command_defines_an_option_by_hand() -> None:
    by_hand = {
        str(path.relative_to(ROOT))
        for folder in ("elastable", "replicas")
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ROOT / "elastable" / "embedding_store")
        and ("typer.Option" in path.read_text() or "typer.Argument" in path.read_text())
    }
    # `--version` ends the command before there are options.
    assert by_hand == {"elastable/commands/command_line.py", "elastable/command.py"}


_OTHERS = {"until": "end", "workers": "7", "on": "ray://host:7", "master": "file:///of/addresses"}


def _other_value(field: OptionField) -> object:
    """A value that is allowed, and is not the default."""
    if field.option.choices:
        return next(choice for choice in field.option.choices if choice != field.default)
    if bool in field.kinds:
        return not field.default
    if int in field.kinds:
        return max(7, field.option.at_least or 0)
    if float in field.kinds:
        return 2.5
    if field.option.metavar == "SIZE":
        return "2MiB"
    if field.name in _OTHERS:
        return _OTHERS[field.name]
    if field.option.metavar == "HOST:PORT":
        return "host:7"
    return ("a", "b") if tuple in field.kinds else Path("x y") if field.kinds[0] is Path else "redis://host:1"


@pytest.mark.parametrize("config", [JobOptions, TrainOptions, WorkerOptions, ServerOptions])
def test_words_of_a_config_give_the_config_again(config: type) -> None:
    """What a launcher forwards to a child process reaches it, whatever option there is."""
    seen: list[object] = []
    child = typer.Typer()
    child.command()(takes(config)(seen.append))
    options = {name: _other_value(field) for name, field in option_fields(config).items()}
    for name in ("stores", "partition", "warm_start", "warm_tables"):
        options.pop(name, None)  # they contradict some of the others
    whole = config(**options)
    least = config(
        **{
            name: value
            for name, value in options.items()
            if option_fields(config)[name].default is MISSING or name == "model"
        }
    )
    for expected in (whole, least):
        ran = CliRunner().invoke(child, command_words(expected))
        assert ran.exit_code == 0, ran.output
        assert seen.pop() == expected
    assert set(option_fields(config)) == {field.name for field in fields(config) if field.init}


def test_words_of_store_servers_give_them_again() -> None:
    seen: list[TrainOptions] = []
    child = typer.Typer()
    child.command()(takes(TrainOptions)(seen.append))
    dns = ("dns://stores.default.svc:50061?count=3",)
    for stores, here in ((("3",), 3), (("a:1", "b:2"), 0), (dns, 0)):
        options = TrainOptions(Path("m.py"), stores=stores)
        assert options.local_stores == here
        assert CliRunner().invoke(child, command_words(options)).exit_code == 0
        assert seen.pop() == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stores": ("0",)}, "from 1 to 64"),
        ({"workers": "0"}, "--workers 0: must be at least 1"),
        ({"workers": "many"}, "--workers many: write a number, or the least and the most, as in 2:8"),
        ({"workers": "3:2", "on": "ray"}, "the least and the most"),
        ({"workers": "2:8"}, "--workers 2:8 is for a cluster: name it with --on"),
        ({"worker_gpus": 1.0}, "--worker-gpus is for a cluster: name it with --on"),
        ({"on": "slurm"}, "--on slurm: write --on ray, or --on ray://HOST:PORT"),
        ({"on": "ray://host"}, "--on: address 'host'"),
        ({"on": "ray", "memory": "much"}, "size 'much'"),
        ({"stores": ("a:1", "a:1")}, "appears twice"),
        ({"stores": ("a",)}, "a"),
        ({"stores": ("dns://stores:50061",)}, r"dns://stores:50061: write dns://name:port\?count=N"),
        ({"stores": ("dns://stores:0?count=2",)}, "port 0 is for listening"),
        ({"stores": ("dns://stores:1?count=0",)}, "N from 1 to"),
        ({"stores": ("a:1",), "store": "file:///x"}, "each store server elsewhere has its own --store"),
        ({"stores": ("2",), "store": "token:memory,memory"}, "keeps its own rows"),
        ({"store": "grpc://a:1"}, "store grpc://a:1: every row .*write --stores host:port,host:port"),
        ({"store": "token:grpc://a:1,grpc://b:1"}, "write --stores host:port,host:port"),
        ({"store": "encoding:memory,grpc://b:1"}, "encoding:grpc://b:1,.*every row and gradient of the job"),
        ({"store": "redis://h:1?namspace=x"}, "did you mean namespace"),
        ({"store": "file://relative"}, "three slashes"),
        ({"store": "disk"}, "store 'disk' is unknown"),
        ({"store": "token:memory,grpc://nowhere"}, "address 'nowhere'"),
        ({"http": "8080"}, "--http: address '8080': write host:port"),
        ({"listen": "here"}, "--listen: address 'here': write host:port"),
        ({"full_every": 0}, "--full-every 0: must be at least 1"),
        ({"warm_tables": ("users",)}, "--warm-tables needs --warm-start"),
        ({"rerun": True}, "--rerun needs --resume"),
        ({"partition": "encoding"}, "--partition needs --stores"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: Keywords, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TrainOptions(Path("m.py"), **options)


def test_words_leave_out_defaults_and_what_is_named() -> None:
    options = TrainOptions(Path("m.py"), epochs=2, shuffle=False, resume=True, checkpoint_dir="kept")
    assert command_words(options, leave_out=("resume", "checkpoint_dir")) == ["m.py", "--epochs", "2", "--no-shuffle"]


@dataclass(frozen=True, slots=True)
class _Settings:
    name: str = required(Option("A name."))
    count: int = setting(1, Option("A count.", at_least=1))
    seconds: float | None = setting(None, Option("Some time.", flags=("--time",), above=0))
    kind: str = setting("a", Option("A kind.", choices=("a", "b")))
    names: tuple[str, ...] = setting((), Option("Names."))
    switched: bool = setting(False, Option("A switch."))

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "--count 0: must be at least 1"),
        ({"count": 1.5}, "--count 1.5: must be at least 1"),
        ({"count": True}, "--count True: must be at least 1"),
        ({"count": None}, "--count None: must be at least 1"),
        ({"seconds": 0.0}, "--time 0.0: must be above 0"),
        ({"seconds": float("nan")}, "--time nan: must be above 0"),
        ({"seconds": float("inf")}, "--time inf: must be above 0"),
        ({"kind": "c"}, "--kind c: must be one of a, b"),
        ({"name": 3}, "--name 3: must be of type str"),
        ({"names": "a"}, "--names a: must be of type tuple"),
        ({"switched": 1}, "--switched 1: must be of type bool"),
    ],
)
def test_a_config_refuses_what_its_definition_does_not_allow(wrong: Keywords, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        _Settings(**{"name": "n", **wrong})
    assert str(caught.value) == message


def test_a_config_takes_what_its_definition_allows() -> None:
    made = _Settings("n", count=10**400, seconds=3, kind="b", names=("a",), switched=True)
    assert (made.count, made.seconds) == (10**400, 3)


def test_settings_that_a_python_program_gives_are_named_as_it_writes_them() -> None:
    with pytest.raises(BadInput, match=r"^dim=0: must be at least 1$"):
        TrainSettings(dim=0)
    with pytest.raises(BadInput, match=r"^loss='hinge': must be one of whole-softmax, "):
        TrainSettings(loss="hinge")
