"""What a built wheel installs, and what runs with which extra, next to a program's modules named like our folders."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.elastable.processes import LIMIT_S
from tests.elastable.small_models import store_model
from tests.wheel.conftest import FOLDERS, ROOT
from tests.wheel.environments import Environment, run, wheel_metadata

NAMES = (*FOLDERS, "proto", "tests", "benchmarks", "examples", "deploy", "elastable_utils", "conftest")
HERE = Path(sys.executable)

MODEL = """
import keras
import numpy as np

import elastable as et
{imports}

MINE = {{module.__name__: module.WHOSE for module in ({names})}}
assert set(MINE.values()) == {{"mine"}}, MINE


def model():
    import worker  # again, where a worker process builds the model

    assert worker.WHOSE == "mine", worker
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows = et.Embedding(worker.ROWS, 4, name="things")(ids)
    made = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    made.compile("adam", "mse")
    return made


def data(split):
    chance = np.random.default_rng(5)
    return chance.integers(0, worker.ROWS, (64, 2)), chance.normal(size=(64, 1)).astype("float32")
"""

SCRIPT = """
import sys

import elastable as et
import model
import worker

x, y = model.data("train")
trained = model.model()
history = et.fit(trained, (x, y), batch_size=16, epochs=2, verbose=0, seed=1)
assert history.history["loss"][1] < history.history["loss"][0], history.history
assert worker.WHOSE == "mine"
assert sys.modules["elastable.worker"] is not worker
print("trained")
"""


# Of Elastable, before Keras: where tests import both, Keras is the first.
LOADS_A_MODEL = """
import sys, elastable
assert "keras" not in sys.modules, "elastable imports Keras"
import keras
print(type(keras.models.load_model("saved.keras").get_layer("users")).__module__)
"""


ALL_NAMES = """
from importlib.util import find_spec

print(find_spec("mpi4py"))
print(len([getattr(et, name) for name in et.__all__]))
"""


ABSENT = "from importlib.util import find_spec; print([n for n in {!r} if find_spec(n)])"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "program"
    home.mkdir()
    for name in NAMES:
        (home / f"{name}.py").write_text('WHOSE = "mine"\nROWS = 40\n')
    imports = "\n".join(f"import {name}" for name in NAMES)
    (home / "model.py").write_text(MODEL.format(imports=imports, names=", ".join(NAMES)))
    (home / "script.py").write_text(SCRIPT)
    (home / "bare_program.py").write_text((Path(__file__).parent / "bare_program.py").read_text())
    return home


@contextmanager
def serving(environment: Environment, folder: Path) -> Iterator[str]:
    """`elastable serve` of an environment; its address."""
    command = [str(environment.python.with_name("elastable")), "serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            output = server.stdout.readline()
            found = re.match(r"parameter server at (\S+), store memory", output)
            assert found, output + server.stdout.read()
            yield found[1]
        finally:
            server.terminate()
            server.wait(LIMIT_S)


TRAIN = ("-m", "elastable", "train", "model.py", "--workers", "2", "--grads-to-wait", "1")
JOB = (*TRAIN, "--micro-batch-size", "16", "--checkpoint-dir", "c")


def result_of(folder: Path) -> tuple[int, int]:
    """Version and examples of the newest run."""
    result = json.loads((folder / "runs" / "latest" / "result.json").read_text())
    return result["version"], result["examples"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_file_trains_beside_them(folder: Path) -> None:
    run(folder, HERE, *JOB)
    assert result_of(folder) == (4, 64)


def test_a_wheel_holds_one_name_and_all_of_ours(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    information = {name.partition("/")[0] for name in held if ".dist-info/" in name}
    assert len(information) == 1
    assert {name.partition("/")[0] for name in held} == {"elastable", *information}
    ours = {
        f"elastable/{file.relative_to(ROOT)}" if folder != "elastable" else str(file.relative_to(ROOT))
        for folder in (*FOLDERS, "elastable")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".pyi", ".typed", ".html", ".lua")
        and file.resolve().relative_to(ROOT).parts[0] == folder
    }
    assert len(ours) > 300
    assert {name for name in held if name.startswith("elastable/")} == ours


@pytest.mark.parametrize("stub", ["embedding_store.v1.store_pb2", "master.v1.master_pb2"])
def test_stubs_have_names_of_ours_in_the_pool_of_protobuf(stub: str) -> None:
    """One process cannot have two files or two messages of one name."""
    described = import_module(f"elastable.{stub}").DESCRIPTOR
    package, _, file = stub.rpartition(".")
    assert described.package == f"elastable.{package}"
    assert described.name == f"elastable/{package.replace('.', '/')}/{file.removesuffix('_pb2')}.proto"


def test_the_wheel_asks_for_what_pyproject_says(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = wheel_metadata(wheel)
    assert metadata.version == project["version"]
    needs = [Requirement(line) for line in metadata.requires or ()]
    unasked = {need.name for need in needs if need.marker is None}
    assert unasked == {Requirement(line).name for line in project["dependencies"]}
    assert not {"tensorflow", "keras", "pyarrow", "mpi4py"} & unasked


def test_a_bare_install_adds_one_name(bare: Environment, with_keras: Environment) -> None:
    for environment in (bare, with_keras):
        names = {name for name in environment.added if not name.endswith(".dist-info")}
        assert names == {"elastable"}
        assert len(environment.added) == 2


def test_a_bare_install_has_tables_a_server_and_a_client(bare: Environment, folder: Path) -> None:
    assert run(folder, bare.python, "-c", ABSENT.format(("tensorflow", "keras", "pyarrow", "mpi4py"))) == "[]\n"
    with serving(bare, folder) as address:
        output = run(folder, bare.python, "bare_program.py", address, str(folder / "rows"))
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        assert output == f"all of it runs, version {version}\n"
        status = json.loads(run(folder, bare.python, "-m", "elastable", "status", "--master", address, "--json"))
        assert (status["version"], status["state"]) == (1, "serving")


COMMANDS = {
    "train model.py": "keras",
    "master model.py": "keras",
    "worker model.py --master 127.0.0.1:1": "keras",
    "plan model.py": "keras",
    "evaluate model.py --checkpoint c": "keras",
    "kg train umls": "replicas",
    "replicas -n 2 script.py": "replicas",
}


FREE_COMMANDS = ("--help", "train --help", "--version")
EACH_COMMAND = """
import contextlib, io, json, runpy, sys

ended = {}
for command in sys.argv[1:]:
    sys.argv = ["elastable", *command.split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = 0
        try:
            runpy.run_module("elastable", run_name="__main__")
        except SystemExit as exit:
            code = exit.code or 0
    ended[command] = (code, out.getvalue(), err.getvalue())
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def ended(bare: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command in a bare install, one after the other in one interpreter."""
    home = tmp_path_factory.mktemp("commands")
    (home / "script.py").touch()
    output = run(home, bare.python, "-c", EACH_COMMAND, *COMMANDS, *FREE_COMMANDS)
    return {command: tuple(how) for command, how in json.loads(output).items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_say_which_extra_they_need(ended: dict[str, tuple[int, str, str]], command: str) -> None:
    code, out, err = ended[command]
    assert (code, out) == (10, "")
    assert re.match(rf"NotInstalled: elastable {command.split()[0]} needs ", err), err
    assert err.endswith(f'pip install "elastable[{COMMANDS[command]}]"\n'), err


def test_help_and_version_need_no_extra(ended: dict[str, tuple[int, str, str]]) -> None:
    assert [(code, err) for code, _, err in (ended[command] for command in FREE_COMMANDS)] == [(0, "")] * 3
    shown, trained, version = (ended[command][1] for command in FREE_COMMANDS)
    assert "serve" in shown
    assert "--workers" in trained
    assert re.fullmatch(r"elastable \d+\.\d+\.\d+\S*\n", version)


def test_every_module_of_the_store_is_there_without_an_extra(bare: Environment, folder: Path) -> None:
    program = """
import pkgutil
from importlib import import_module

import elastable.embedding_store as store

found = [module.name for module in pkgutil.walk_packages(store.__path__, "elastable.embedding_store.")]
for name in found:
    import_module(name)
print(len(found))
"""
    # Packages and modules, all but the store's own package.
    assert int(run(folder, bare.python, "-c", program)) == len([*(ROOT / "embedding_store").rglob("*.py")]) - 1


def test_keras_is_the_extra_that_trains(with_keras: Environment, folder: Path) -> None:
    saved = store_model()
    saved.compile("adam", "mse")
    saved.save(folder / "saved.keras")
    (folder / "script.py").write_text(LOADS_A_MODEL + SCRIPT + ALL_NAMES)
    loaded, output, missing, names = run(folder, with_keras.python, "script.py").splitlines()
    assert (loaded, output, missing) == ("elastable.worker.layers.embedding", "trained", "None")
    assert int(names) > 40


JOBS_ON_JAX = """
from importlib import import_module

for name in ("jobs.master_process", "jobs.worker_process", "jobs.serving", "models.trained", "in_process.fitting"):
    import_module(f"elastable.{name}")
"""


def test_with_jax_there_is_no_other_framework_and_nothing_needs_one(with_jax: Environment, folder: Path) -> None:
    assert run(folder, with_jax.python, "-c", ABSENT.format(("tensorflow", "torch", "mpi4py"))) == "[]\n"
    run(folder, with_jax.python, "-c", JOBS_ON_JAX, KERAS_BACKEND="jax")


@pytest.mark.slow  # tests/backends trains where other frameworks cannot be imported
def test_jax_trains_where_there_is_no_other_framework(with_jax: Environment, folder: Path) -> None:
    assert run(folder, with_jax.python, "script.py", KERAS_BACKEND="jax") == "trained\n"
    run(folder, with_jax.python, *JOB, KERAS_BACKEND="jax")
    assert result_of(folder) == (4, 64)


def test_what_is_missing_is_named_with_the_extra_of_the_backend(
    bare: Environment, with_jax: Environment, folder: Path
) -> None:
    for environment, backend, library, extra in (
        (bare, "torch", "Keras", "torch"),
        (with_jax, "torch", "PyTorch", "torch"),
        (with_jax, "tensorflow", "TensorFlow (unless KERAS_BACKEND is jax or torch)", "keras"),
    ):
        said = run(folder, environment.python, "-m", "elastable", *JOB[2:], code=10, KERAS_BACKEND=backend)
        assert f'needs {library}, which is not installed: pip install "elastable[{extra}]"' in said


@pytest.mark.parametrize(("extra", "framework"), [("keras", "tensorflow"), ("jax", "jax"), ("torch", "torch")])
def test_an_extra_brings_one_framework(wheel: Path, extra: str, framework: str) -> None:
    needs = [Requirement(line) for line in wheel_metadata(wheel).requires or ()]

    def brought(by: str) -> set[str]:
        direct = [need for need in needs if need.marker is not None and need.marker.evaluate({"extra": by})]
        return {need.name for need in direct}.union(*(brought(more) for need in direct for more in need.extras))

    assert brought(extra) & {"tensorflow", "jax", "torch"} == {framework}
    assert {"keras", "pyarrow", "tensorboard", "matplotlib"} <= brought(extra)
