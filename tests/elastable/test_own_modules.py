"""A program whose own modules have the names of our folders: they are its own, and ours are `elastable.*`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.elastable.processes import LIMIT_S

ROOT = Path(__file__).parents[2]
FOLDERS = ("embedding_store", "master", "worker", "replicas")
NAMES = (*FOLDERS, "proto", "tests", "benchmarks", "examples", "deploy", "elastable_utils", "conftest")

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program's folder."""
    home = tmp_path / "program"
    home.mkdir()
    for name in NAMES:
        (home / f"{name}.py").write_text('WHOSE = "mine"\nROWS = 40\n')
    imports = "\n".join(f"import {name}" for name in NAMES)
    (home / "model.py").write_text(MODEL.format(imports=imports, names=", ".join(NAMES)))
    (home / "script.py").write_text(SCRIPT)
    return home


def run(folder: Path, *words: str, **environment: str) -> str:
    """What a Python process in that folder writes."""
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.timeout(900)
def test_a_model_file_trains_and_resumes_beside_them(folder: Path) -> None:
    job = [
        "-m",
        "elastable",
        "train",
        "model.py",
        "--workers",
        "1",
        "--micro-batch-size",
        "16",
        "--checkpoint-dir",
        "c",
    ]
    run(folder, *job)
    told = run(folder, *job, "--epochs", "2", "--resume")
    assert "resuming at version 4" in told
    result = json.loads((folder / "runs" / "latest" / "result.json").read_text())
    assert (result["version"], result["examples"]) == (8, 64)


def test_a_script_trains_beside_them(folder: Path) -> None:
    assert run(folder, "script.py") == "trained\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy: builds leave files behind."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*FOLDERS, "elastable", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    run(home, "-m", "pip", "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(home), str(source))
    (built,) = home.glob("*.whl")
    return built


def test_a_wheel_holds_one_name_and_all_of_ours(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    information = {name.partition("/")[0] for name in held if ".dist-info/" in name}
    assert len(information) == 1
    assert {name.partition("/")[0] for name in held} == {"elastable", *information}
    ours = {
        f"elastable/{file.relative_to(ROOT)}" if folder != "elastable" else str(file.relative_to(ROOT))
        for folder in (*FOLDERS, "elastable")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".pyi", ".typed") and file.resolve().relative_to(ROOT).parts[0] == folder
    }
    assert len(ours) > 400
    assert {name for name in held if name.startswith("elastable/")} == ours


def test_an_installed_wheel_is_imported_beside_them(wheel: Path, folder: Path) -> None:
    place = wheel.parent / "installed"
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    run(folder, "-m", "pip", "install", *offline, "--target", str(place), str(wheel))
    assert {path.name for path in place.iterdir() if not path.name.endswith(".dist-info")} == {"elastable", "bin"}
    ask = """
import embedding_store, master, worker
import elastable as et
import elastable.command, elastable.master_process, elastable.worker_process, elastable.parameter_server
import sys
assert (worker.WHOSE, master.WHOSE, embedding_store.WHOSE) == ("mine",) * 3
for name in et.__all__:
    getattr(et, name)
print(sorted({module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "elastable"}))
"""
    files = run(folder, "-c", ask, PYTHONPATH=str(place))
    found = json.loads(files.replace("'", '"'))
    assert len(found) > 100
    assert all(file.startswith(str(place)) for file in found), found


def test_nothing_of_ours_imports_what_is_not_installed() -> None:
    """Benchmarks, examples and tests are in the checkout alone; a program's modules may have their names."""
    for folder in (*FOLDERS, "elastable"):
        for file in (ROOT / folder).rglob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]):
                    assert words[1].split(".")[0] not in NAMES, f"{file}: {line}"
