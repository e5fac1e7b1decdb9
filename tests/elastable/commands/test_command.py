"""The `elastable` command: its help, its exit codes, and a bare parameter server."""

from __future__ import annotations

import json
import logging
import queue
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store import errors
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.native.string_ids import hash_ids
from elastable.embedding_store.wire.access.credentials import ENVIRONMENT
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.remote_store import RemoteStore
from elastable.master.api import AsyncPushId, Push, PushOutcome, Slices
from elastable.master.wire.client import MasterClient
from elastable.process.exit_codes import ExitCode, error_of, exit_code_of
from tests.elastable.processes import CLICK_JOB, Finished, elastable, run_elastable

COMMANDS = ("train", "master", "worker", "serve", "evaluate", "predict", "export", "plan", "status", "lookup")

BROKEN = {
    "raises_at_once": "x = 1\nraise RuntimeError('no such luck')\n",
    "model_raises": (
        "import numpy as np\n\ndef data(split):\n    return np.zeros((4, 1), int), np.zeros(4)\n\n"
        "def model():\n    return undefined\n"
    ),
    "data_raises": "def model():\n    return None\n\ndef data(split):\n    return open('absent.csv')\n",
    "data_none": "def model():\n    return None\n\ndef data(split):\n    return None\n",
    "data_empty": (
        "import numpy as np\n\ndef model():\n    return None\n\n"
        "def data(split):\n    return np.zeros((0, 1)), np.zeros(0)\n"
    ),
    "data_kind": "def model():\n    return None\n\ndef data(split):\n    return 7\n",
    "model_kind": (
        "import numpy as np\n\ndef data(split):\n    return np.zeros((4, 1), int), np.zeros(4)\n\n"
        "def model():\n    return 7\n"
    ),
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

    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_every_command(self, command: str) -> None:
        ran = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert ran.exit_code == 0
        assert f"elastable {command} [OPTIONS]" in ran.output.replace("root", "elastable")

    def test_no_help_text_has_a_hole(self) -> None:
        """What stands in brackets without a backslash is markup to rich, and is not shown."""
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
            ["train", "m.py", "--workers", "0"],
            ["train", "m.py", "--epochs", "many"],
        ],
    )
    def test_a_wrong_command_line(self, arguments: list[str]) -> None:
        assert CliRunner().invoke(app, arguments).exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.IdOutOfRange, ExitCode.BAD_INPUT),
        (errors.SpecConflict, ExitCode.BAD_INPUT),
        (errors.NotFinite, ExitCode.BAD_INPUT),
        (errors.ModelError, ExitCode.BAD_MODEL),
        (errors.Unsupported, ExitCode.BAD_MODEL),
        (errors.DeadlineExceeded, ExitCode.UNAVAILABLE),
        (errors.StoreFailed, ExitCode.STORE_FAILED),
        (errors.JobFailed, ExitCode.JOB_FAILED),
        (errors.StaleVersion, ExitCode.JOB_FAILED),
        (errors.CheckpointError, ExitCode.BAD_CHECKPOINT),
        (errors.ElastableError, ExitCode.UNEXPECTED),
    ],
)
def test_every_error_has_an_exit_code(error: type[errors.ElastableError], code: ExitCode) -> None:
    assert exit_code_of(error("x")) is code


def test_an_exit_code_tells_of_the_kind_of_error() -> None:
    assert error_of(ExitCode.UNAVAILABLE) is errors.Unavailable
    assert error_of(ExitCode.BAD_MODEL) is errors.ModelError
    assert error_of(-9) is errors.JobFailed
    assert error_of(ExitCode.UNEXPECTED) is errors.JobFailed


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Finished]:
    """Command lines that end in an error, by name, run in one process."""
    home = tmp_path_factory.mktemp("refused")
    for name, text in BROKEN.items():
        (home / f"{name}.py").write_text(text)
    (home / "file").write_text("no directory")
    train = ("train", "--run-dir", home / "runs")
    commands: dict[str, tuple[str | Path, ...]] = {
        **{name: (*train, home / f"{name}.py") for name in BROKEN},
        "no_such_file": (*train, home / "absent.py"),
        "redis_away": (*train, CLICK_JOB, "--store", "redis://127.0.0.1:1?deadline=0.5"),
        "store_unknown": (*train, CLICK_JOB, "--store", "postgres://127.0.0.1"),
        "mode_unknown": (*train, CLICK_JOB, "--mode", "eventually"),
        "resume_from_nowhere": (*train, CLICK_JOB, "--resume"),
        "run_dir": ("train", CLICK_JOB, "--run-dir", home / "file" / "runs"),
        "checkpoint_dir": (*train, CLICK_JOB, "--checkpoint-dir", home / "file" / "kept"),
        "deadline": (*train, CLICK_JOB, "--deadline", "0"),
        "master_away": ("worker", CLICK_JOB, "--master", "127.0.0.1:1", "--deadline", "0.5"),
        "master_address": ("worker", CLICK_JOB, "--master", "nowhere"),
        "worker_without_a_file": ("worker", "--master", "127.0.0.1:1", "--deadline", "0.5"),
        "no_checkpoint": ("evaluate", CLICK_JOB, "--checkpoint", home),
        "predict_suffix": ("predict", CLICK_JOB, "--checkpoint", home, "--output", home / "p.csv"),
        "export_suffix": ("export", CLICK_JOB, "--checkpoint", home, "--output", home / "m.h5"),
        "status_away": ("status", "--master", "127.0.0.1:1", "--deadline", "0.5"),
        "lookup_nowhere": ("lookup", "users", "3"),
        "lookup_redis_away": ("lookup", "users", "3", "--store", "redis://127.0.0.1:1?deadline=0.5"),
        "lookup_redis_deadline": ("lookup", "users", "3", "--store", "redis://127.0.0.1:1", "--deadline", "0.5"),
        "lookup_grpc_deadline": ("lookup", "users", "3", "--store", "grpc://127.0.0.1:1", "--deadline", "0.5"),
        "lookup_url_deadline": ("lookup", "u", "3", "--store", "redis://127.0.0.1:1?deadline=0.3", "--deadline", "9"),
        "job_deadline": (*train, CLICK_JOB, "--store", "redis://127.0.0.1:1", "--deadline", "0.5"),
        "list_nowhere": ("checkpoint", "list", home / "nowhere"),
        "list_empty": ("checkpoint", "list", home / "file", "--json"),
        "serve_not_finite": ("serve", "--not-finite", "ignore"),
        "serve_deadline": ("serve", "--deadline", "-1"),
        "serve_calls": ("serve", "--client-calls", "3"),
        "serve_bytes": ("serve", "--client-bytes", "0MiB"),
        "serve_transport": ("serve", "--transport", "pigeon"),
        "serve_shared": ("serve", "--store", "token:memory,memory", "--transport", "shared"),
    }
    with elastable(home, "serve", "--listen", "127.0.0.1:0") as bare:
        commands["no_model_there"] = ("worker", CLICK_JOB, "--master", bare.address())
        ran = [run_elastable(*command) for command in commands.values()]
        bare.signal(signal.SIGTERM)
        assert bare.wait() == ExitCode.DONE, bare.err
    return dict(zip(commands, ran, strict=True))


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("raises_at_once", ExitCode.BAD_MODEL, "raised RuntimeError at raises_at_once.py:2: no such luck"),
        ("model_raises", ExitCode.BAD_MODEL, "model() raised NameError at model_raises.py:7"),
        ("model_kind", ExitCode.BAD_MODEL, "model() returned a int; return a compiled keras.Model"),
        ("data_raises", ExitCode.BAD_MODEL, "data('train') raised FileNotFoundError at data_raises.py:5"),
        ("data_none", ExitCode.BAD_MODEL, "data('train') returned None"),
        ("data_empty", ExitCode.BAD_INPUT, "data_empty.py: data('train'): "),
        ("data_kind", ExitCode.BAD_INPUT, "data_kind.py: data('train'): data is a int; give a Reader"),
        ("exits", ExitCode.BAD_MODEL, "exits.py: loading it raised SystemExit at exits.py:2"),
        ("no_data", ExitCode.BAD_MODEL, "no_data.py: defines no data()"),
        ("syntax", ExitCode.BAD_MODEL, "syntax.py: loading it raised SyntaxError"),
        ("worker_without_a_file", ExitCode.BAD_INPUT, "no model file is named: write `elastable worker MODEL.py"),
        ("no_such_file", ExitCode.BAD_MODEL, "absent.py: no such model file"),
        ("redis_away", ExitCode.UNAVAILABLE, "redis at 127.0.0.1:1 cannot be reached"),
        ("store_unknown", ExitCode.BAD_INPUT, "store 'postgres://127.0.0.1' is unknown"),
        ("mode_unknown", ExitCode.USAGE, "Invalid value for '--mode': eventually must be one of sync, async"),
        ("resume_from_nowhere", ExitCode.BAD_INPUT, "--resume needs --checkpoint-dir"),
        ("run_dir", ExitCode.BAD_INPUT, "file/runs cannot be written"),
        ("checkpoint_dir", ExitCode.BAD_INPUT, "checkpoints cannot be written to"),
        ("deadline", ExitCode.USAGE, "Invalid value for '--deadline': 0.0 must be above 0"),
        ("master_away", ExitCode.UNAVAILABLE, "127.0.0.1:1 cannot be reached within the deadline of 0.5 s"),
        ("master_address", ExitCode.BAD_INPUT, "address 'nowhere': write host:port"),
        (
            "no_model_there",
            ExitCode.BAD_MODEL,
            "the server trains no model (it is the parameter server of elastable serve)",
        ),
        ("no_checkpoint", ExitCode.BAD_CHECKPOINT, "no checkpoint there"),
        ("predict_suffix", ExitCode.BAD_INPUT, "predictions are written as .npy"),
        ("export_suffix", ExitCode.BAD_INPUT, "models are written as .keras"),
        ("status_away", ExitCode.UNAVAILABLE, "127.0.0.1:1 cannot be reached within the deadline of 0.5 s"),
        ("lookup_nowhere", ExitCode.BAD_INPUT, "exactly one of --master, --store and --checkpoint"),
        ("lookup_redis_away", ExitCode.UNAVAILABLE, "redis at 127.0.0.1:1 cannot be reached"),
        ("lookup_redis_deadline", ExitCode.UNAVAILABLE, "(the deadline was 0.5 s)"),
        ("lookup_grpc_deadline", ExitCode.UNAVAILABLE, "within the deadline of 0.5 s"),
        ("lookup_url_deadline", ExitCode.UNAVAILABLE, "(the deadline was 0.3 s)"),
        ("job_deadline", ExitCode.UNAVAILABLE, "(the deadline was 0.5 s)"),
        ("list_nowhere", ExitCode.BAD_CHECKPOINT, "nowhere: no checkpoint there"),
        ("list_empty", ExitCode.BAD_CHECKPOINT, "no checkpoint there"),
        ("serve_not_finite", ExitCode.USAGE, "'--not-finite': ignore must be one of refuse, skip"),
        ("serve_deadline", ExitCode.USAGE, "Invalid value for '--deadline': -1.0 must be above 0"),
        ("serve_calls", ExitCode.USAGE, "'--client-calls': 3 must be at least 16"),
        ("serve_bytes", ExitCode.BAD_INPUT, "--client-bytes 0MiB: must be above 0"),
        ("serve_transport", ExitCode.USAGE, "'--transport': pigeon must be one of auto, grpc, shared"),
        ("serve_shared", ExitCode.BAD_INPUT, "are not in shared memory"),
    ],
)
def test_refused(refused: Mapping[str, Finished], name: str, code: ExitCode, told: str) -> None:
    ran = refused[name]
    assert told in " ".join(ran.err.replace("│", " ").split())
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
        commit = channel.stream_unary(f"/{STORE_SERVICE}/Commit", None, None)

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
            with MasterClient(address, deadline_s=30) as client:
                client.store().create_table(TableSpec("t", 2, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)))
                before = client.store().lookup({"t": ids})["t"]
                slices = {"t": Slices(ids, np.ones((1, 2), np.float32))}
                assert client.report_gradient(Push(AsyncPushId("a", 1), 1, slices=slices)).version == 1
            ran = run_elastable("lookup", "t", "5", "--master", address)
            np.testing.assert_allclose(json.loads(ran.out)["row"], before[0] - 1, rtol=1e-6)
            with MasterClient(address, deadline_s=30) as client:
                client.store().create_table(TableSpec("users", 2, ids="farmhash64"))
                named = client.store().lookup({"users": hash_ids(["alice", "42"])})["users"]
            ran = run_elastable("lookup", "users", "alice", "42", "--master", address)
            told = [json.loads(line) for line in ran.out.splitlines()]
            assert [(line["string"], line["id"]) for line in told] == [
                (text, int(hash_ids(text))) for text in ("alice", "42")
            ]
            np.testing.assert_allclose([line["row"] for line in told], named, rtol=1e-6)
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
            occupied = run_elastable("serve", "--listen", address)
            assert occupied.code == ExitCode.BAD_INPUT
            assert f"cannot listen on {address}: Address already in use" in occupied.err
            server.signal(signal.SIGINT)
            assert server.wait() == ExitCode.DONE, server.err

    def test_its_options_are_in_force(self, tmp_path: Path) -> None:
        ids: Int64 = np.array([5], np.int64)
        options = ("--not-finite", "skip", "--client-calls", "16")
        with elastable(tmp_path, "serve", "--listen", "127.0.0.1:0", *options) as server:
            with MasterClient(server.address(), deadline_s=30) as client:
                client.store().create_table(TableSpec("t", 2, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)))
                slices = {"t": Slices(ids, np.full((1, 2), np.nan, np.float32))}
                reply = client.report_gradient(Push(AsyncPushId("a", 1), 1, slices=slices))
            assert (reply.outcome, reply.version) == (PushOutcome.SKIPPED, 0)
            assert "16 calls of the client ipv4:127.0.0.1:" in refusal_of_silent_calls(server.address(), 40)
            server.signal(signal.SIGTERM)
            assert server.wait() == ExitCode.DONE, server.err


def test_traces_are_refused_where_there_are_none_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:4317"
    monkeypatch.setenv("ELASTABLE_LOG_FORMAT", "text")  # which the command sets

    def refusal(*words: str) -> BaseException | None:
        return CliRunner().invoke(app, list(words), obj=lambda level, form: None).exception

    told = refusal("--traces", url, "status", "--help")
    assert isinstance(told, errors.BadInput)
    assert "elastable status makes no traces; train, master, worker, serve, store do" in str(told)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "elastable.monitoring.opentelemetry_tracer", raising=False)
    told = refusal("--traces", url, "worker", "--help")
    assert isinstance(told, errors.NotInstalled)
    assert 'pip install "elastable[traces]"' in str(told)


def test_a_variable_for_traces_does_not_stop_a_command_that_cannot_make_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTABLE_LOG_FORMAT", "text")  # which the command sets
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "elastable.monitoring.opentelemetry_tracer", raising=False)
    log = logging.getLogger("elastable.command")
    log.addHandler(caplog.handler)  # the log of Elastable may not propagate
    try:
        for command, told in (("status", False), ("worker", True)):
            caplog.clear()
            with caplog.at_level("WARNING", log.name):
                assert CliRunner().invoke(app, [command, "--help"], obj=lambda level, form: None).exit_code == 0
            assert any("nothing is traced" in record.getMessage() for record in caplog.records) == told
    finally:
        log.removeHandler(caplog.handler)
