"""The `elastable` command: its help, its exit codes, and a bare parameter server."""

import json
import logging
import queue
import re
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store import TableUpdate, errors
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.native.string_ids import hash_ids
from elastable.embedding_store.wire.access.credentials import ENVIRONMENT
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.process.exit_codes import ExitCode, error_of
from tests.elastable.processes import CLICK_JOB, elastable, run_elastable

COMMANDS = ("train", "master", "worker", "serve", "evaluate", "predict", "export", "plan", "status", "lookup")

_DATA = "import numpy as np\n\ndef data(split):\n    return np.zeros((4, 1), int), np.zeros(4)\n\n"
BROKEN = {
    "raises_at_once": "x = 1\nraise RuntimeError('no such luck')\n",
    "model_raises": _DATA + "def model():\n    return undefined\n",
    "data_raises": "def model():\n    return None\n\ndef data(split):\n    return open('absent.csv')\n",
    "data_empty": (
        "import numpy as np\n\ndef model():\n    return None\n\n"
        "def data(split):\n    return np.zeros((0, 1)), np.zeros(0)\n"
    ),
    "data_kind": "def model():\n    return None\n\ndef data(split):\n    return 7\n",
    "model_kind": _DATA + "def model():\n    return 7\n",
    "exits": "import sys\nsys.exit(3)\n",
    "no_data": "def model():\n    return None\n",
    "syntax": "def model(:\n",
}


def _help_texts(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Help of a command, of its options and of the commands below it, as (name, text)."""
    yield name, command.help
    for parameter in command.params:
        if text := getattr(parameter, "help", None):
            yield f"{name} {parameter.name}", text
    for below, inner in getattr(command, "commands", {}).items():
        yield from _help_texts(inner, f"{name} {below}")


class TestHelp:
    def test_lists_commands_and_exit_codes(self) -> None:
        ran = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
        assert ran.exit_code == 0
        for word in (*COMMANDS, *(code.meaning for code in ExitCode), *ENVIRONMENT):
            assert word in ran.output

    def test_no_help_text_has_a_hole(self) -> None:
        """What is in brackets without a backslash is markup to rich, and is not shown."""
        texts = dict(_help_texts(typer.main.get_command(app), "elastable"))
        assert len(texts) > 100
        for where, text in texts.items():
            assert Text.from_markup(text).plain == text.replace("\\[", "["), where
            assert text[0].isupper() or text.split()[0].strip(":,;") == text.split()[0].strip(":,;").lower(), where

    def test_version_is_the_one_of_the_project(self) -> None:
        ran = CliRunner().invoke(app, ["--version"])
        project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
        assert (ran.exit_code, ran.output) == (0, f"elastable {project['version']}\n")

    def test_without_arguments_it_says_what_there_is(self) -> None:
        assert "Usage" in CliRunner().invoke(app, []).output

    @pytest.mark.parametrize(
        "arguments",
        [
            ["unheard-of"],
            ["train"],
            ["master"],
            ["master", "--store", "memory"],
            ["train", "m.py", "--epochs", "many"],
        ],
    )
    def test_a_wrong_command_line(self, arguments: list[str]) -> None:
        assert CliRunner().invoke(app, arguments).exit_code == ExitCode.USAGE


def test_an_exit_code_tells_of_the_kind_of_error() -> None:
    assert error_of(ExitCode.UNAVAILABLE) is errors.Unavailable
    assert error_of(ExitCode.BAD_MODEL) is errors.ModelError
    assert error_of(-9) is errors.JobFailed
    assert error_of(ExitCode.UNEXPECTED) is errors.JobFailed


REFUSED: dict[ExitCode, dict[str, str]] = {
    ExitCode.BAD_MODEL: {
        "train HOME/raises_at_once.py": "raised RuntimeError at raises_at_once.py:2: no such luck",
        "train HOME/model_raises.py": "model() raised NameError at model_raises.py:7",
        "train HOME/model_kind.py": "model() returned a int; return a compiled keras.Model",
        "train HOME/data_raises.py": "data('train') raised FileNotFoundError at data_raises.py:5",
        "train HOME/exits.py": "exits.py: loading it raised SystemExit at exits.py:2",
        "train HOME/no_data.py": "no_data.py: defines no data()",
        "train HOME/syntax.py": "syntax.py: loading it raised SyntaxError",
        "train HOME/absent.py": "absent.py: no such model file",
    },
    ExitCode.BAD_INPUT: {
        "train HOME/data_empty.py": "data_empty.py: data('train'): ",
        "train HOME/data_kind.py": "data_kind.py: data('train'): data is a int; give a Reader",
        "worker --master 127.0.0.1:1 --deadline 0.5": "no model file is named: write `elastable worker MODEL.py",
        "train JOB --store postgres://127.0.0.1": "store 'postgres://127.0.0.1' is unknown",
        "train JOB --resume": "--resume needs --checkpoint-dir",
        "train JOB --run-dir HOME/file/runs": "file/runs cannot be written",
        "train JOB --checkpoint-dir HOME/file/kept": "checkpoints cannot be written to",
        "worker JOB --master nowhere": "address 'nowhere': write host:port",
        "predict JOB --checkpoint HOME --output HOME/p.csv": "predictions are written as .npy",
        "export HOME --format keras --output HOME/m.h5": "--format keras writes a file .keras",
        "export HOME --format serving --output HOME/m.keras": "and the other formats a folder",
        "export HOME --format serving --output HOME": "is there already, and nothing is overwritten",
        "export HOME --format serving --output HOME/none/x": "there is no directory",
        "export HOME --format keras --dtype int8 --output HOME/m.keras": "plain layers keep rows as float32",
        "lookup users 3": "exactly one of --master, --store and --checkpoint",
        "serve --client-bytes 0MiB": "--client-bytes 0MiB: must be above 0",
        "serve --store token:memory,memory --transport shared": "are not in shared memory",
    },
    ExitCode.UNAVAILABLE: {
        "worker JOB --master 127.0.0.1:1 --deadline 0.5": "127.0.0.1:1 cannot be reached within the deadline of 0.5 s",
        "status --master 127.0.0.1:1 --deadline 0.5": "127.0.0.1:1 cannot be reached within the deadline of 0.5 s",
        "lookup users 3 --store grpc://127.0.0.1:1 --deadline 0.5": "within the deadline of 0.5 s",
        "lookup u 3 --store redis://127.0.0.1:1?deadline=0.3 --deadline 9": "(the deadline was 0.3 s)",
        "train JOB --store redis://127.0.0.1:1 --deadline 0.5": (
            "redis at 127.0.0.1:1 cannot be reached: Error 111 connecting to 127.0.0.1:1. Connection refused. "
            "(the deadline was 0.5 s)"
        ),
    },
    ExitCode.USAGE: {
        # test_options gives every option a wrong value.
        "train JOB --mode eventually": "Invalid value for '--mode': eventually must be one of sync, async",
    },
    ExitCode.BAD_CHECKPOINT: {
        "evaluate JOB --checkpoint HOME": "no checkpoint there",
        "checkpoint list HOME/nowhere": "nowhere: no checkpoint there",
    },
}
"""Command lines, by the code that they end with, and what they say; JOB is a model that trains."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the broken model files, and a file where a folder is wanted."""
    home = tmp_path_factory.mktemp("refused")
    for name, text in BROKEN.items():
        (home / f"{name}.py").write_text(text)
    (home / "file").write_text("no directory")
    return home


@pytest.mark.parametrize(("code", "line"), [(code, line) for code, lines in REFUSED.items() for line in lines])
def test_refused(home: Path, code: ExitCode, line: str) -> None:
    places = {"JOB": str(CLICK_JOB), "HOME": str(home)}
    words = [re.sub("JOB|HOME", lambda found: places[found[0]], word) for word in line.split()]
    runs = ("--run-dir", home / "runs") if words[0] == "train" and "--run-dir" not in words else ()
    ran = run_elastable(*words, *runs)
    assert REFUSED[code][line] in " ".join(ran.err.replace("│", " ").split())
    assert ran.code == code
    # One line for a person, and no traceback.
    assert "Traceback" not in ran.err


def refusal_of_silent_calls(address: str, count: int) -> str:
    """What a server says to one of so many calls of one client that send nothing, and have no room together."""
    ended: queue.Queue[grpc.Future] = queue.Queue()
    leave = threading.Event()

    def nothing() -> Iterator[bytes]:
        leave.wait(600)
        yield from ()

    with grpc.insecure_channel(address) as channel:
        commit = channel.stream_unary(f"/{STORE_SERVICE}/PushRows", None, None)

        def begin() -> None:
            commit.future(nothing(), timeout=600).add_done_callback(ended.put)

        for _ in range(count):
            begin()
        try:
            while True:
                error = ended.get(timeout=300).exception()
                if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    return str(error.details())
                begin()  # a silent call may have been ended before the others had begun
        finally:
            leave.set()


class TestServe:
    def test_serves_tables_until_it_is_stopped(self, tmp_path: Path) -> None:
        with elastable(tmp_path, "serve", "--listen", "127.0.0.1:0") as server:
            address = server.address()
            ids: Int64 = np.array([5], np.int64)
            with RemoteStore(address, deadline_s=30) as client:
                client.create_table(TableSpec("t", 2, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)))
                before = client.lookup({"t": ids})["t"]
                assert client.update({"t": TableUpdate(ids, np.ones((1, 2), np.float32))}, {}) == 1
            ran = run_elastable("lookup", "t", "5", "--master", address)
            np.testing.assert_allclose(json.loads(ran.out)["row"], before[0] - 1, rtol=1e-6)
            with RemoteStore(address, deadline_s=30) as client:
                client.create_table(TableSpec("users", 2, ids="farmhash64"))
                named = client.lookup({"users": hash_ids(["alice", "42"])})["users"]
            ran = run_elastable("lookup", "users", "alice", "42", "--master", address)
            output = [json.loads(line) for line in ran.out.splitlines()]
            assert [(line["string"], line["id"]) for line in output] == [
                (text, int(hash_ids(text))) for text in ("alice", "42")
            ]
            np.testing.assert_allclose([line["row"] for line in output], named, rtol=1e-6)
            ran = run_elastable("lookup", "t", "alice", "--master", address)
            assert (ran.code, "'alice' is no id of table 't'" in ran.err) == (ExitCode.BAD_INPUT, True)
            shown = run_elastable("status", "--master", address)
            assert "parameter server" in shown.out
            assert "version" in shown.out
            assert " of 0" not in shown.out
            assert "pinned" not in shown.out
            with RemoteStore(address, deadline_s=30) as store, store.pin(lease_s=600.0):
                shown = run_elastable("status", "--master", address, "--json")
            (pin,) = json.loads(shown.out)["pins"]
            assert (pin["version"], pin["rows"], pin["bytes"]) == (1, 0, 0)
            assert 500 < pin["lease_left_s"] <= 600
            worker = run_elastable("worker", CLICK_JOB, "--master", address)
            assert worker.code == ExitCode.BAD_MODEL
            assert "trains no model (it is the parameter server of elastable serve)" in " ".join(worker.err.split())
            occupied = run_elastable("serve", "--listen", address)
            assert occupied.code == ExitCode.BAD_INPUT
            assert f"cannot listen on {address}: Address already in use" in occupied.err
            server.signal(signal.SIGINT)
            assert server.wait() == ExitCode.DONE, server.err
            assert "metrics" not in server.out, "there is no HTTP unless --http says so"

    def test_its_options_are_in_force(self, tmp_path: Path) -> None:
        ids: Int64 = np.array([5], np.int64)
        options = ("--not-finite", "skip", "--client-calls", "16")
        with elastable(tmp_path, "serve", "--listen", "127.0.0.1:0", *options) as server:
            with RemoteStore(server.address(), deadline_s=30) as client:
                client.create_table(TableSpec("t", 2, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)))
                update = TableUpdate(ids, np.full((1, 2), np.nan, np.float32))
                with pytest.raises(errors.NotFinite, match="'t'"):
                    client.update({"t": update}, {})
                assert client.version() == 0
            assert "16 calls of the client ipv4:127.0.0.1:" in refusal_of_silent_calls(server.address(), 40)
            server.signal(signal.SIGTERM)
            assert server.wait() == ExitCode.DONE, server.err


def test_traces_are_refused_where_there_are_none_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:4317"
    monkeypatch.setenv("ELASTABLE_LOG_FORMAT", "text")  # which the command sets

    def refusal(*words: str) -> BaseException | None:
        return CliRunner().invoke(app, list(words), obj=lambda level, form: None).exception

    message = refusal("--traces", url, "status", "--help")
    assert isinstance(message, errors.BadInput)
    assert "elastable status makes no traces; train, master, worker, serve, store do" in str(message)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "elastable.monitoring.opentelemetry_tracer", raising=False)
    message = refusal("--traces", url, "worker", "--help")
    assert isinstance(message, errors.NotInstalled)
    assert 'pip install "elastable[traces]"' in str(message)


def test_traces_by_variable_stop_no_command(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ELASTABLE_LOG_FORMAT", "text")  # which the command sets
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "elastable.monitoring.opentelemetry_tracer", raising=False)
    log = logging.getLogger("elastable.command")
    log.addHandler(caplog.handler)  # the log of Elastable may not propagate
    try:
        for command, warned in (("status", False), ("worker", True)):
            caplog.clear()
            with caplog.at_level("WARNING", log.name):
                assert CliRunner().invoke(app, [command, "--help"], obj=lambda level, form: None).exit_code == 0
            assert any("nothing is traced" in record.getMessage() for record in caplog.records) == warned
    finally:
        log.removeHandler(caplog.handler)
