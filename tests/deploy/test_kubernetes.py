"""The files for Kubernetes: valid, confined, and in agreement with the command, the image and Compose."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.wire.access.credentials import ENVIRONMENT
from elastable.monitoring.metrics import METRICS
from elastable.monitoring.tracing import ENDPOINT_VARIABLES
from elastable.process.exit_codes import ExitCode
from tests.untyped import Parsed

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
WRITTEN = [path for path in sorted(FOLDER.glob("*/*.yaml")) if path.name != "kustomization.yaml"]
LASTING = {ExitCode[name] for name in ("USAGE", "BAD_INPUT", "BAD_MODEL", "UNAUTHENTICATED", "PERMISSION_DENIED")}


def documents(path: Path) -> list[Parsed]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found is not None]


def pods(found: Parsed) -> Iterator[Parsed]:
    if found["kind"] in ("Job", "StatefulSet", "Deployment"):
        yield found["spec"]["template"]["spec"]
    elif found["kind"] == "ScaledJob":
        yield found["spec"]["jobTargetRef"]["template"]["spec"]


def everything() -> list[Parsed]:
    return [found for path in WRITTEN for found in documents(path)]


def rendered(overlay: str) -> list[Parsed]:
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert not ran.stderr  # a field that is deprecated
    return list(yaml.safe_load_all(ran.stdout))


def job(found: list[Parsed], name: str) -> Parsed:
    (pod,) = [pod for one in found if one["metadata"]["name"] == name for pod in pods(one)]
    container: Parsed = pod["containers"][0]
    return container


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_is_written_is_valid(path: Path) -> None:
    found = documents(path)
    assert found
    for document in found:
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_every_file_is_taken_by_a_kustomization() -> None:
    for kustomization in FOLDER.rglob("kustomization.yaml"):
        settings = yaml.safe_load(kustomization.read_text())
        named = {name for name in settings.get("resources", ()) if name.endswith(".yaml")}
        named |= {patch["path"] for patch in settings.get("patches", ())}
        named |= set(settings.get("configurations", ()))
        named |= {name for files in settings.get("configMapGenerator", ()) for name in files.get("files", ())}
        assert named == {path.name for path in kustomization.parent.iterdir()} - {kustomization.name}
        for other in settings.get("resources", ()):
            assert (kustomization.parent / other).exists()


def test_the_model_of_the_overlay_is_the_smallest_example() -> None:
    """Kustomize takes no file from outside of its folder, so this one is a copy."""
    copied = FOLDER / "overlays" / "own-model" / "model.py"
    assert copied.read_text() == (ROOT / "examples" / "minimal.py").read_text()


def test_images_have_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tags = [
        image["newTag"]
        for kustomization in FOLDER.rglob("kustomization.yaml")
        for image in yaml.safe_load(kustomization.read_text()).get("images", ())
    ]
    assert len(tags) == 4
    assert set(tags) == {version}
    assert f"/elastable:{version} " in (ROOT / "deploy/README.md").read_text()


def test_every_pod_is_confined() -> None:
    found = [pod for one in everything() for pod in pods(one)]
    assert len(found) == 5
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert isinstance(pod["securityContext"]["runAsUser"], int)
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["terminationGracePeriodSeconds"] >= 30
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(container["resources"])
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_image_runs_as_the_user_that_pods_name() -> None:
    user = re.search(r"^USER (\d+):", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    for path in ("base/master.yaml", "base/workers.yaml", "stores/stores.yaml", "predictions/predictions.yaml"):
        for found in documents(FOLDER / path):
            for pod in pods(found):
                assert pod["securityContext"]["runAsUser"] == int(user[1])


@pytest.mark.parametrize("name", ["master", "workers", "store", "predictions"])
def test_options_are_those_of_the_command(name: str) -> None:
    container = job(everything(), f"elastable-{name}")
    help_text = CliRunner().invoke(app, [container["command"][1], "--help"], env={"COLUMNS": "300"}).output
    assert container["command"][0] == "elastable"
    for word in container["args"]:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word.partition('=')[0])}\b", help_text), word
    given = {literal.partition("=")[0] for literal in _settings(FOLDER / "base")}
    assert {used for word in container["args"] for used in re.findall(r"\$\((\w+)\)", word)} <= given


@pytest.mark.parametrize("name", ["master", "workers"])
def test_errors_that_last_end_a_job_and_others_do_not(name: str) -> None:
    """A container whose every try would fail alike is not started again, by Compose either."""
    (found,) = [one for one in everything() if one["metadata"]["name"] == f"elastable-{name}" and one["kind"] == "Job"]
    *_, rule = found["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert set(rule["onExitCodes"]["values"]) == LASTING
    script = (ROOT / "deploy/worker.sh").read_text()
    assert f"{' | '.join(str(int(code)) for code in sorted(LASTING))}) exit" in script


def test_scaled_workers_are_those_of_the_base() -> None:
    (scaled,) = documents(FOLDER / "overlays/scaled/scaled-workers.yaml")
    (plain,) = [one for one in everything() if one["metadata"]["name"] == "elastable-workers" and one["kind"] == "Job"]
    spec: Parsed = scaled["spec"]
    target = spec["jobTargetRef"]
    assert {name: target[name] for name in ("template", "podFailurePolicy")} == {
        name: plain["spec"][name] for name in ("template", "podFailurePolicy")
    }
    as_a_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": plain["metadata"], "spec": target}
    kubernetes_validate.validate(as_a_job, "1.30", strict=True)
    (trigger,) = spec["triggers"]
    names = re.findall(r"elastable_\w+", trigger["metadata"]["query"])
    assert names
    assert set(names) <= set(METRICS)
    # Nobody is there to work for before the master has begun, and after its end: none is started then.
    assert (spec["minReplicaCount"], trigger["metadata"]["ignoreNullValues"]) == (0, "true")


def test_redis_refuses_writes_before_its_container_is_killed() -> None:
    container = job(everything(), "elastable-redis")
    (most,) = re.findall(r"--maxmemory (\d+)gb ", container["command"][-1])
    assert int(most) <= 0.8 * int(container["resources"]["limits"]["memory"].removesuffix("Gi"))


def _settings(folder: Path) -> list[str]:
    (generator,) = yaml.safe_load((folder / "kustomization.yaml").read_text())["configMapGenerator"]
    return list(generator["literals"])


def require_stores(found: list[Parsed], listed: str, args: list[str]) -> None:
    """The master calls every pod of the StatefulSet, in the order of their numbers, at the port that it listens on."""
    of_stores = {one["kind"]: one for one in found if one["metadata"]["name"] == "elastable-store"}
    assert set(of_stores) == {"Service", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget"}
    pods_of, service = of_stores["StatefulSet"]["spec"], of_stores["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert pods_of["serviceName"] == service["metadata"]["name"]
    names = [f"elastable-store-{number}.{pods_of['serviceName']}" for number in range(pods_of["replicas"])]
    (container,) = pods_of["template"]["spec"]["containers"]
    (listen,) = [word.rpartition(":")[2] for word in container["args"] if word.startswith("--listen=")]
    assert listed.split(",") == [f"{name}:{listen}" for name in names]
    assert "--stores=$(STORES)" in args
    assert not [word for word in args if word.startswith("--store=")]
    (data,) = pods_of["volumeClaimTemplates"]
    assert data["metadata"]["name"] in {mount["name"] for mount in container["volumeMounts"]}
    (runs,) = [one for one in found if one["kind"] == "PersistentVolumeClaim"]
    assert runs["spec"]["accessModes"] == ["ReadWriteMany"]
    assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
    callers, *_ = of_stores["NetworkPolicy"]["spec"]["ingress"]
    allowed = {one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in callers["from"]}
    assert allowed == {"master", "worker"}
    assert callers["ports"] == [{"port": int(listen)}]


def test_predictions_scale_by_a_metric_that_there_is_and_drain_before_they_end() -> None:
    found = {one["kind"]: one for one in documents(FOLDER / "predictions/predictions.yaml")}
    scaler, deployment = found["HorizontalPodAutoscaler"]["spec"], found["Deployment"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": deployment["metadata"]["name"],
    }  # fmt: skip
    assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} <= set(METRICS)
    assert "replicas" not in deployment["spec"]  # each `apply` would undo what the scaler has done
    (pod,) = pods(deployment)
    (drain,) = [float(word.partition("=")[2]) for word in pod["containers"][0]["args"] if word.startswith("--drain=")]
    assert drain + 10 <= pod["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert {port["name"]: port["port"] for port in found["Service"]["spec"]["ports"]} == ports
    for name, port in ports.items():
        assert f"--{name}=0.0.0.0:{port}" in pod["containers"][0]["args"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_rendered_and_valid(overlay: str) -> None:
    found = rendered(overlay)
    for document in found:
        if document["kind"] != "ScaledJob":  # KEDA's own; what it makes is validated above
            kubernetes_validate.validate(document, "1.30", strict=True)
    master, workers = job(found, "elastable-master"), job(found, "elastable-workers")
    redis = [one for one in found if one["metadata"]["name"] == "elastable-redis"]
    ((name, settings),) = [
        (one["metadata"]["name"], one["data"]) for one in found if one["metadata"]["name"].startswith("elastable-job-")
    ]
    if overlay == "stores":
        assert not redis
        require_stores(found, settings["STORES"], master["args"])
        assert not master["env"]
    elif overlay == "own-redis":
        assert not redis
        assert settings["STORE"].startswith("rediss://")
    else:
        assert {one["kind"] for one in redis} == {"Service", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget"}
        assert settings["STORE"] == "redis://elastable-redis:6379"
    if overlay == "tls":
        for container in (master, workers):
            variables = {one["name"] for one in container["env"]} & set(ENVIRONMENT)
            assert {"ELASTABLE_TLS_CA", "ELASTABLE_TLS_CERT", "ELASTABLE_TLS_KEY"} < variables
            assert "--insecure" not in container["args"]
        assert "ELASTABLE_TOKEN_FILE" not in {one["name"] for one in workers["env"]}
        assert {one["name"] for one in master["env"]} >= {"ELASTABLE_REDIS_USER", "ELASTABLE_REDIS_PASSWORD"}
    else:
        assert "--insecure" in master["args"]
    if overlay == "traces":
        assert urlsplit(settings[ENDPOINT_VARIABLES[-1]]).port == 4317
        for container in (master, workers):
            assert [one["configMapRef"]["name"] for one in container["envFrom"]] == [name]
    else:
        assert not set(ENDPOINT_VARIABLES) & set(settings)
    if overlay == "predictions":
        container = job(found, "elastable-predictions")
        assert [one["configMapRef"]["name"] for one in container["envFrom"]] == [name]
        assert container["image"] == master["image"]
    if overlay == "scaled":
        kinds = {one["kind"] for one in found if one["metadata"]["name"] == "elastable-workers"}
        assert ("ScaledJob" in kinds, "Job" in kinds) == (True, False)
        assert workers["image"] == master["image"]
        assert [one["configMapRef"]["name"] for one in workers["envFrom"]] == [name]
    if overlay == "own-model":
        assert settings["MODEL"] == "/model/model.py"
        for container in (master, workers):
            assert "/model" in {mount["mountPath"] for mount in container["volumeMounts"]}
