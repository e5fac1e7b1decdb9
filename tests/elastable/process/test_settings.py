"""Settings from a file and from the environment: which one counts, and what is refused."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from elastable.command import app
from elastable.commands.command_line import takes
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, OptionField, required, setting
from elastable.process.settings import CONFIG_VARIABLE, variable_of

ROOT = Path(__file__).parents[3]
PACKAGES = ("embedding_store", "master", "worker", "replicas", "elastable")


@dataclass(frozen=True, slots=True)
class Settings:
    program: Path = required(Option("A file.", metavar="PROGRAM.py", positional=True))
    batch_size: int = setting(32, Option("Records.", at_least=1))
    rate: float = setting(0.5, Option("A rate.", above=0))
    tables: tuple[str, ...] = setting((), Option("Names."))
    shuffle: bool = setting(True, Option("Whether to shuffle."))
    mode: str = setting("sync", Option("How.", choices=("sync", "async")))
    seen: str = setting("", Option("What a child process would see."))


@pytest.fixture
def received() -> list[Settings]:
    return []


@pytest.fixture
def tool(received: list[Settings]) -> typer.Typer:
    """`tool train` and `tool other`."""
    made = typer.Typer()

    @takes(Settings)
    def train(settings: Settings) -> None:
        """Train."""
        received.append(settings)
        assert not {"ELASTABLE_BATCH_SIZE", "ELASTABLE_RATE", CONFIG_VARIABLE} & set(os.environ)

    @takes(Settings)
    def other(settings: Settings) -> None:
        """Another one."""

    made.command()(train)
    made.command()(other)
    return made


def run(tool: typer.Typer, *words: str, **environment: str) -> Result:
    return CliRunner().invoke(tool, list(words), env={"COLUMNS": "300", **environment})


def file_of(folder: Path, text: str) -> str:
    (folder / "job.toml").write_text(text)
    return str(folder / "job.toml")


def test_which_setting_counts_first(tool: typer.Typer, received: list[Settings], tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        """
        program = "a.py"
        batch-size = 1
        rate = 2
        tables = ["x", "y z"]
        shuffle = false
        [train]
        mode = "async"
        batch_size = 10
        [other]
        nonsense = 1
        """,
    )
    assert run(tool, "train", "--config", file).exit_code == 0
    assert received.pop() == Settings(Path("a.py"), 10, 2.0, ("x", "y z"), False, "async")
    ran = run(tool, "train", "b.py", "--rate", "3", ELASTABLE_CONFIG=file, ELASTABLE_BATCH_SIZE="7", ELASTABLE_RATE="9")
    assert ran.exit_code == 0, ran.output
    assert received.pop() == Settings(Path("b.py"), 7, 3.0, ("x", "y z"), False, "async")
    assert run(tool, "train", "c.py", ELASTABLE_TABLES="p,q", ELASTABLE_SHUFFLE="0", ELASTABLE_RATE="").exit_code == 0
    assert received.pop() == Settings(Path("c.py"), tables=("p", "q"), shuffle=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise = 1", "batch_sise is no setting of elastable train; did you mean batch_size?"),
        ("batch-size = 0", "batch-size = 0: must be at least 1"),
        ('batch-size = "8"', "batch-size = '8': must be at least 1"),
        ("shuffle = 1", "shuffle = 1: must be of type bool"),
        ("rate = nan", "rate = nan: must be above 0"),
        ("tables = [1]", r'tables = \[1\]: must be a list of strings, as tables = \["1"\]'),
        ('tables = "p"', r"""tables = 'p': must be a list of strings, as tables = \["p"\]"""),
        ('mode = "both"', "mode = 'both': must be one of sync, async"),
        ("[train]\nbatch = 1", r"\[train\] batch is no setting of elastable train"),
        ("[trian]\nrate = 1.0", r"\[trian\] is no command of elastable; did you mean train\?"),
        ("rate = ", "Invalid value"),
        ("rate = " + "[" * 100_000, "maximum recursion depth"),
        ("rate = " + "9" * 5_000, "Exceeds the limit"),
    ],
)
def test_wrong_settings(tool: typer.Typer, received: list[Settings], tmp_path: Path, text: str, message: str) -> None:
    file = file_of(tmp_path, text)
    ran = run(tool, "train", "a.py", "--config", file)
    assert isinstance(ran.exception, BadInput)
    assert re.search(f"settings file {re.escape(file)}: {message}", str(ran.exception))
    assert not received


def test_a_file_that_is_not_there_and_a_variable_that_cannot_be_are_refused(tool: typer.Typer, tmp_path: Path) -> None:
    missing = run(tool, "train", "a.py", "--config", str(tmp_path / "none.toml"))
    assert isinstance(missing.exception, BadInput)
    assert "No such file" in str(missing.exception)
    wrong = run(tool, "train", "a.py", ELASTABLE_BATCH_SIZE="0")
    assert wrong.exit_code == 2
    assert "must be at least 1" in wrong.output


def _options(command: object) -> Iterator[OptionField]:
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)
    yield from getattr(getattr(command, "callback", None), "options", {}).values()


def test_no_setting_has_the_variable_of_something_else() -> None:
    settings = {variable_of(field) for field in _options(typer.main.get_command(app))}
    assert {"ELASTABLE_MODEL", "ELASTABLE_EPOCHS", "ELASTABLE_MICRO_BATCH_SIZE"} <= settings
    sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    written = {word for path in sources for word in re.findall(r'"(ELASTABLE_[A-Z_]+)"', path.read_text())}
    assert len(written) > 10
    assert not (written - {CONFIG_VARIABLE}) & settings


def test_config_show_says_where_each_value_comes_from(tmp_path: Path) -> None:
    file = file_of(
        tmp_path, 'epochs = 3\n[kg.train]\ndim = 4\n[train]\nworkers = 4\nstore = "redis://me:secret@host:1"'
    )
    words = ["config", "show", "train", "--config", file]
    ran = CliRunner().invoke(app, [*words, "--json"], env={"ELASTABLE_SEED": "7"})
    shown = json.loads(ran.output)
    assert shown["epochs"] == {"value": 3, "from": file}
    assert shown["workers"] == {"value": 4, "from": file}
    assert shown["seed"] == {"value": "7", "from": "ELASTABLE_SEED"}
    assert shown["mode"] == {"value": "sync", "from": "default"}
    assert shown["model"] == {"value": None, "from": "to be given"}
    table = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output
    for output in (ran.output, table):
        assert "secret" not in output
        assert "host:1" in output
    assert "default" in table
    refused = CliRunner().invoke(app, ["config", "show", "kg"])
    assert isinstance(refused.exception, BadInput)
