"""One wheel, built once, and environments that hold it."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.wheel.environments import OFFLINE, Environment, make_environment, run

ROOT = Path(__file__).parents[2]
FOLDERS = ("embedding_store", "master", "worker", "replicas")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy: builds leave files behind."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*FOLDERS, "elastable", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    words = ("-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(home), str(source))
    run(home, Path(sys.executable), *words)
    (built,) = home.glob("*.whl")
    return built


def environment(home: Path, wheel: Path, *extras: str) -> Environment:
    """With the kernels that this checkout has compiled from the same sources: none is compiled again."""
    made = make_environment(home, wheel, extras)
    for folder in FOLDERS:
        for kernel in (ROOT / folder).rglob("*.nbc"):
            there = made.site / "elastable" / kernel.relative_to(ROOT)
            there.parent.mkdir(exist_ok=True)
            shutil.copy(kernel, there)
    return made


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install elastable`."""
    return environment(tmp_path_factory.mktemp("bare"), wheel)


@pytest.fixture(scope="session")
def with_jax(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install "elastable[jax]"`."""
    return environment(tmp_path_factory.mktemp("jax"), wheel, "jax")


@pytest.fixture(scope="session")
def with_keras(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install "elastable[keras]"`."""
    return environment(tmp_path_factory.mktemp("keras"), wheel, "keras")
