"""What docker-compose.yml and the image promise; the health check runs as it is, and `-m compose` needs an engine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.storage.redis_log import COMPOSE_LIMITS
from elastable.command import app
from elastable.embedding_store.wire.access.credentials import ENVIRONMENT, Credentials
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.monitoring.tracing import ENDPOINT_VARIABLES
from tests.certificates import TOKEN, Authority
from tests.untyped import Parsed

ROOT = Path(__file__).parents[2]


SERVICES = ("redis", "store", "master", "worker", "predictions")


@pytest.fixture(scope="module")
def compose() -> dict[str, object]:
    loaded: dict[str, object] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def dockerfile() -> list[str]:
    """The Dockerfile's instructions, one a string, without comments and continuation lines."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy/Dockerfile").read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_can_be_scaled_says_whether_it_is_healthy_and_is_confined(compose: Parsed, service: str) -> None:
    settings = compose["services"][service]
    assert "container_name" not in settings  # a fixed name allows one container only
    assert "ports" not in settings  # nor can two containers publish one port
    assert settings["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert settings["read_only"] is True
    assert settings["tmpfs"] == ["/tmp"]
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert {"pids_limit", "mem_limit"} <= set(settings)
    assert set(settings["logging"]["options"]) == {"max-size", "max-file"}


def test_workers_name_the_file_that_the_master_runs(compose: Parsed) -> None:
    assert compose["services"]["worker"]["command"][:2] == ["worker.sh", "master:50051"]
    assert compose["services"]["worker"]["command"][2] == compose["services"]["master"]["command"][2]


def test_rows_and_runs_lie_on_named_volumes(compose: Parsed) -> None:
    assert set(compose["volumes"]) == {"redis", "runs"}
    assert compose["services"]["redis"]["volumes"] == ["redis:/data"]
    assert compose["services"]["master"]["volumes"] == ["runs:/runs"]
    assert "--run-dir=/runs" in compose["services"]["master"]["command"]


def test_redis_writes_an_append_only_file_to_its_volume_and_rewrites_it_by_measured_limits(compose: Parsed) -> None:
    command = compose["services"]["redis"]["command"][-1]
    for words in ("--appendonly yes", "--dir /data", " ".join(COMPOSE_LIMITS)):
        assert words in command


def test_the_image_brings_compiled_kernels_in_a_folder_of_its_user(dockerfile: list[str]) -> None:
    (folder,) = [word.partition("=")[2] for line in dockerfile for word in line.split() if "NUMBA_CACHE_DIR=" in word]
    assert f"COPY --from=kernels --chown=elastable:elastable {folder} {folder}" in dockerfile


def test_store_master_and_worker_are_one_image(compose: Parsed) -> None:
    ours = [compose["services"][name] for name in SERVICES if name != "redis"]
    assert len({settings["image"] for settings in ours}) == 1
    master = compose["services"]["master"]
    assert all(settings["build"] == master["build"] for settings in ours)
    assert (ROOT / master["build"]["dockerfile"]).is_file()


def test_nobody_runs_as_root(compose: Parsed, dockerfile: list[str]) -> None:
    users = [line.split()[1] for line in dockerfile if line.startswith("USER ")]
    assert users == ["10001:10001"]  # Kubernetes' runAsNonRoot takes no name
    assert any("useradd --uid 10001 --user-group" in line for line in dockerfile)
    assert compose["services"]["redis"]["user"] == "999:999"
    assert "usermod --uid 999 redis" in (ROOT / "deploy/base-images.sh").read_text()
    assert not any("user" in compose["services"][name] for name in ("store", "master", "worker"))


def test_the_labels_are_those_of_the_package(dockerfile: list[str]) -> None:
    (label,) = [line for line in dockerfile if line.startswith("LABEL ")]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', label))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (labels["version"], labels["licenses"]) == (project["version"], "Apache-2.0")


def test_the_image_has_every_extra_that_its_extras_name(dockerfile: list[str]) -> None:
    (brought,) = [
        set(re.findall(r'"(\w+)"', said)) for line in dockerfile for said in re.findall(r"brought = (.*?);", line)
    ]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [need for name in brought for need in extras[name] if need.startswith("elastable[")]
    assert {name for need in named for name in need[len("elastable[") : -1].split(",")} <= brought


def test_memory_is_limited_and_redis_refuses_writes_before_its_container_is_killed(compose: Parsed) -> None:
    limits = {settings["mem_limit"] for settings in compose["services"].values()}
    assert limits == {"${ELASTABLE_MEMORY:-8g}"}
    redis = compose["services"]["redis"]
    assert redis["environment"]["REDIS_MEMORY"] == "${REDIS_MEMORY:-6gb}"
    assert '--maxmemory "$$REDIS_MEMORY"' in redis["command"][-1]


def test_the_master_alone_is_a_user_of_redis(compose: Parsed) -> None:
    assert compose["services"]["master"]["environment"]["ELASTABLE_REDIS_USER"] == "master"
    assert "ELASTABLE_REDIS_PASSWORD" not in compose["services"]["worker"].get("environment", {})


def test_every_process_of_ours_can_be_traced(compose: Parsed) -> None:
    # Empty where it is not set, which says the same as no variable (elastable.commands).
    for service, settings in compose["services"].items():
        endpoint = settings["environment"].get(ENDPOINT_VARIABLES[-1])
        assert endpoint == (None if service == "redis" else "${OTEL_EXPORTER_OTLP_ENDPOINT:-}")


def test_the_image_builds_with_the_classic_builder(dockerfile: list[str]) -> None:
    needs_buildkit = re.compile(r"--mount|<<|COPY .*--(chmod|link|parents)|# *syntax")
    assert [line for line in dockerfile if needs_buildkit.search(line)] == []


def test_what_the_image_copies_is_let_through_to_the_engine(dockerfile: list[str]) -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for line in dockerfile
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == let_through
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_variables_of_the_compose_test_are_those_of_the_compose_file() -> None:
    known = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    script = (ROOT / "deploy/compose-test.sh").read_text()
    exported = {
        name for line in re.findall(r"^export (.+)$", script, re.MULTILINE) for name in re.findall(r"(\w+)=", line)
    }
    assert exported <= known | {"COMPOSE_FILE"}


def test_the_dockerfile_and_the_compose_files_are_well_written() -> None:
    scripts = Path(sys.executable).parent
    relaxed = "{extends: relaxed, rules: {line-length: disable}}"
    files = ["docker-compose.yml", "deploy/tls.yml", "deploy/kubernetes"]
    for command in (["hadolint", "deploy/Dockerfile"], ["yamllint", "--strict", "-d", relaxed, *files]):
        words = [str(scripts / command[0]), *command[1:]]
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_tls_adds_files_and_variables_to_every_service_but_redis() -> None:
    added: Parsed = yaml.safe_load((ROOT / "deploy/tls.yml").read_text())
    services = ("store", "master", "worker", "predictions")
    assert set(added["services"]) == set(services)
    every = {f"ELASTABLE_TLS_{name}" for name in ("CA", "CERT", "KEY", "NAME")} | {"ELASTABLE_WORKER_TOKEN_FILE"}
    variables = {name: every if name == "worker" else every | {"ELASTABLE_TOKEN_FILE"} for name in services}
    for name, settings in added["services"].items():
        assert set(settings) == {"environment", "volumes"}
        environment = dict(settings["environment"])
        assert set(environment) == variables[name] <= set(ENVIRONMENT)
        # The name that docs/security.md gives the certificate.
        assert environment.pop("ELASTABLE_TLS_NAME") == "${ELASTABLE_TLS_NAME:-master}"
        mounted = {volume.removesuffix(":ro").rpartition(":")[2] for volume in settings["volumes"]}
        # Workers are given the very files that they read, and so not the administrator's token.
        assert mounted == (set(environment.values()) if name == "worker" else {"/run/tls"})
        assert {str(Path(path).parent) for path in environment.values()} == {"/run/tls"}
    if shutil.which("docker-compose"):
        command = [
            "docker-compose",
            "--profile",
            "predictions",
            "-f",
            "docker-compose.yml",
            "-f",
            "deploy/tls.yml",
            "config",
        ]
        variables_of_test = {**os.environ, "ELASTABLE_TLS_DIR": "/somewhere"}
        ran = subprocess.run(
            command, cwd=ROOT, env=variables_of_test, capture_output=True, text=True, timeout=60, check=True
        )
        merged = yaml.safe_load(ran.stdout)["services"]
        for name in services:
            assert variables[name] <= set(merged[name]["environment"])
            # As one string or as a mapping: Compose 1 and 2 differ.
            assert any("/somewhere" in str(volume) and "/run/tls" in str(volume) for volume in merged[name]["volumes"])


def test_predictions_are_those_of_the_checkpoints_that_the_master_writes(compose: Parsed) -> None:
    predictions, master = compose["services"]["predictions"], compose["services"]["master"]
    assert f"--checkpoint-dir={predictions['command'][2]}" in master["command"]
    assert [f"{volume}:ro" for volume in master["volumes"]] == predictions["volumes"]
    assert predictions["profiles"] == ["predictions"]  # nobody waits for them who only trains
    (drain,) = [float(word.partition("=")[2]) for word in predictions["command"] if word.startswith("--drain=")]
    assert drain + 10 <= float(predictions["stop_grace_period"].removesuffix("s"))


def test_the_master_finds_store_servers_where_they_register(compose: Parsed) -> None:
    store, master = compose["services"]["store"], compose["services"]["master"]
    assert store["environment"] == master["environment"]
    assert store["volumes"] == master["volumes"]  # every store server writes its part of a checkpoint
    (register,) = [word.partition("=")[2] for word in store["command"] if word.startswith("--register=")]
    assert f"--store={register}" in store["command"]  # rows are in Redis, too
    assert f"--stores={register}" in master["command"]
    assert not any(word.startswith("--store=") for word in master["command"])
    for words in (store["command"], master["command"], compose["services"]["predictions"]["command"]):
        known = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "300"}).output
        assert not [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("script", [*sorted((ROOT / "deploy").glob("*.sh")), ROOT / ".ci/run"], ids=lambda p: p.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    shell = script.read_text().splitlines()[0].removeprefix("#!").split()[-1]
    subprocess.run([Path(shell).name, "-n", str(script)], check=True, timeout=30)


SCRIPT = ROOT / "deploy" / "master-health.py"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("health") / "tls")


def check(credentials: Credentials, **files: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {f"ELASTABLE_TLS_{name}": str(file) for name, file in files.items()}
    with GrpcServer("127.0.0.1:0", [], credentials=credentials) as server:
        command, env = [sys.executable, str(SCRIPT), server.address], {**os.environ, **variables}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_server_in_plain_text_with_a_token() -> None:
    ran = check(Credentials(token=TOKEN), CA="", CERT="", KEY="")
    assert ran.returncode == 0, ran.stderr


def test_mutual_tls(authority: Authority) -> None:
    mutual = authority.mutual()
    files: dict[str, str | Path] = {"CA": authority.ca, "CERT": str(mutual.certificate), "KEY": str(mutual.key)}
    ran = check(mutual, **files)
    assert ran.returncode == 0, ran.stderr
    for wrong in ({**files, "NAME": "other"}, {"CA": authority.ca}, {}):
        assert check(mutual, **wrong).returncode == 1


def test_tls_where_no_authority_is_set(authority: Authority) -> None:
    certificate, key = authority.issue("here", "127.0.0.1")
    tls = Credentials(certificate=certificate, key=key)
    ran = check(tls, CERT=certificate, KEY=key)
    assert ran.returncode == 0, ran.stderr
    other = authority.issue("other", "127.0.0.1")
    ran = check(tls, CERT=other[0], KEY=other[1])
    assert (ran.returncode, "CERTIFICATE_VERIFY_FAILED" in ran.stderr) == (1, True)


def test_a_file_that_is_missing_is_named() -> None:
    ran = check(Credentials(), CA="/nowhere/ca.pem")
    assert (ran.returncode, "/nowhere/ca.pem" in ran.stderr) == (1, True)
    assert "Traceback" not in ran.stderr


LIMIT_SECONDS = 3600


@pytest.mark.compose
@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_a_killed_worker_and_four_workers_train_the_same_numbers() -> None:
    subprocess.run([ROOT / "deploy/compose-test.sh"], check=True, timeout=LIMIT_SECONDS)
