"""What the workflows, hooks and policies of the repository name is there."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def workflow(name: str) -> dict[Any, Any]:
    loaded: dict[object, object] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return loaded


def commands(name: str) -> list[str]:
    jobs = workflow(name)["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]


def test_every_python_of_the_classifiers_is_tested() -> None:
    job = workflow("ci")["jobs"]["test"]
    said = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]
    assert job["strategy"]["matrix"]["python"] == said
    assert PROJECT["project"]["requires-python"] == f">={said[0]}"
    assert commands("ci") == [".ci/run"]


def test_a_tag_is_tested_before_its_wheel_is_published() -> None:
    jobs = workflow("release")["jobs"]
    assert workflow("release")[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert set(jobs["publish"]["needs"]) == {"test", "wheel"}
    assert any("GITHUB_REF_NAME#v" in command for command in commands("release"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path: Path) -> None:
    for command in commands(path.stem):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in TARGETS, command
    for job in workflow(path.stem)["jobs"].values():
        assert "uses" in job or job["runs-on"] == "ubuntu-24.04"


def test_hooks_run_what_is_there() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    declared = {Requirement(line).name for line in PROJECT["project"]["optional-dependencies"]["dev"]}
    for hook in local["hooks"]:
        tool, *words = shlex.split(hook["entry"])
        if tool == "make":
            assert words[0] in TARGETS
        else:
            assert Path(tool).name in declared | {"python"}
        for word in words:
            assert not word.startswith("tests/") or (ROOT / word).is_file(), word


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_declared_requirement_is_pinned() -> None:
    pins = {normalised(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().split()}
    extras = PROJECT["project"]["optional-dependencies"].values()
    for line in [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]:
        name = normalised(Requirement(line).name)
        assert name == "elastable" or name in pins, f"{line}: write its version into constraints.txt"
