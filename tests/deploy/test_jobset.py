"""The JobSet and the runtime of Kubeflow Trainer, by the models that Kubeflow publishes of both."""

from collections.abc import Iterator

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1ClusterTrainingRuntime
from typer.testing import CliRunner

from elastable.command import app
from elastable.process.version import distribution_version
from tests.deploy.test_compose_file import ROOT
from tests.untyped import Parsed

FOLDER = ROOT / "deploy" / "jobset"
MODELS = {"jobset.yaml": JobsetV1alpha2JobSet, "kubeflow-runtime.yaml": TrainerV1alpha1ClusterTrainingRuntime}
by_file = pytest.mark.parametrize("name", MODELS)


def read(name: str) -> Parsed:
    found: Parsed = yaml.safe_load((FOLDER / name).read_text())
    return found


def jobs(document: Parsed) -> dict[str, Parsed]:
    """Name -> specification of each replicated job."""
    of_set = document["spec"].get("template", document)["spec"]
    return {job["name"]: job["template"]["spec"] for job in of_set["replicatedJobs"]}


def containers(name: str) -> Iterator[Parsed]:
    for job in jobs(read(name)).values():
        yield from job["template"]["spec"]["containers"]


@by_file
def test_it_has_no_field_that_kubeflow_does_not_know(name: str) -> None:
    document = read(name)
    known = MODELS[name].from_dict(document)
    assert known is not None
    assert known.to_dict() == document
    document["spec"]["notAField"] = 1
    assert MODELS[name].from_dict(document).to_dict() != document


@by_file
def test_options_are_those_of_the_commands(name: str) -> None:
    for container in containers(name):
        program, command = container["command"]
        assert program == "elastable"
        known = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).output
        given = [word.partition("=")[0] for word in container["args"] if word.startswith("--")]
        assert given
        assert not [option for option in given if option not in known]
        assert container["image"] == f"elastable:{distribution_version()}"
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {"MODEL", "JOB", "NUMBER"} == {variable["name"] for variable in container["env"]}


@by_file
def test_processes_are_called_where_they_listen(name: str) -> None:
    """The name of a pod is that of its JobSet, of its job in it, of that job's copy, and its own number."""
    there = jobs(read(name))
    stores = [f"$(JOB)-store-0-{number}.$(JOB):50061" for number in range(there["store"]["completions"])]
    said = {container["name"]: container["args"] for container in containers(name)}
    assert f"--stores={','.join(stores)}" in said["master"]
    (workers,) = there.keys() - {"master", "store"}
    assert "--master=$(JOB)-master-0-0.$(JOB):50051" in said[workers]
    assert f"--workers={there[workers]['completions']}" in said["master"]
    assert "--listen=0.0.0.0:50051" in said["master"]
    assert "--listen=0.0.0.0:50061" in said["store"]


def test_the_runtime_runs_the_same_jobs() -> None:
    plain, runtime = jobs(read("jobset.yaml")), jobs(read("kubeflow-runtime.yaml"))
    plain["node"] = plain.pop("worker")
    plain["node"]["template"]["spec"]["containers"][0]["name"] = "node"
    assert runtime == plain
    assert read("kubeflow-runtime.yaml")["spec"]["mlPolicy"]["numNodes"] == plain["node"]["completions"]
