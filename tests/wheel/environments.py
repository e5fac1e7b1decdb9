"""Virtual environments that hold a built wheel and what it requires, and nothing else."""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement

from tests.elastable.processes import LIMIT_S

OFFLINE = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment.

    Attributes:
        python: Its interpreter.
        site: Its site-packages.
        added: Names that installing the wheel added to `site`.
    """

    python: Path
    site: Path
    added: frozenset[str]


def wheel_metadata(wheel: Path) -> Distribution:
    (inside,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    return PathDistribution(inside)


def make_environment(home: Path, wheel: Path, extras: Iterable[str] = ()) -> Environment:
    """A fresh environment with the wheel installed by pip, and the distributions that it requires with `extras`."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python3*/site-packages")
    before = {entry.name for entry in site.iterdir()}
    run(home, Path(sys.executable), "-m", "pip", "--python", str(python), "install", *OFFLINE, str(wheel))
    added = frozenset({entry.name for entry in site.iterdir()} - before)
    for required in _required(wheel_metadata(wheel), extras).values():
        _link(required, site)
    return Environment(python, site, added)


def run(folder: Path, python: Path, *words: str, code: int = 0, **environment: str) -> str:
    """What a Python process in that folder writes to stdout, or to both if it is to end with another code than 0."""
    env = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": "", **environment}
    command = [str(python), *words]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == code, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout + (ran.stderr if code else "")


def _required(wheel: Distribution, extras: Iterable[str]) -> dict[str, Distribution]:
    """All that a distribution requires, and what that requires: by normalised name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(wheel, extra) for extra in ("", *extras)]
    while waiting:
        of, extra = waiting.pop()
        for line in of.requires or ():
            need = Requirement(line)
            name = _normalised(need.name)
            if need.marker is not None and not need.marker.evaluate({"extra": extra}):
                continue
            itself = name == _normalised(wheel.name)
            if not itself:
                found.setdefault(name, distribution(name))
            for wanted in ("", *need.extras):
                if (name, wanted) not in seen:
                    seen.add((name, wanted))
                    waiting.append((wheel if itself else found[name], wanted))
    return found


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _link(required: Distribution, site: Path) -> None:
    """Links the modules, packages and metadata of a distribution; folders that several share are folders here, too."""
    root = Path(str(required.locate_file("")))
    for file in required.files or ():
        parts = file.parts
        if parts[0] in ("..", "/", "__pycache__") or file.suffix == ".pth":
            continue
        depth = 1
        while depth < len(parts) and "." not in parts[0] and not root.joinpath(*parts[:depth], "__init__.py").exists():
            depth += 1
        target, link = root.joinpath(*parts[:depth]), site.joinpath(*parts[:depth])
        if target.exists() and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
