"""Pods of the Kubernetes manifests as containers of a real Docker engine, killed by seeded schedules, to the same bits.

Containers, commands, environment, users, limits and volumes are those that the manifests yield. What controllers do is
done here: who fails is replaced by a pod of the same name and claims, who succeeds is not; of a StatefulSet both.
"""

import io
import json
import queue
import random
import re
import shutil
import subprocess
import tarfile
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from elastable.embedding_store.errors import ElastableError
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.rpc.client import MasterClient
from tests.deploy.test_kubernetes import FOLDER
from tests.elastable.kept_jobs import assert_same
from tests.untyped import Parsed
from tests.waiting import until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]
LIMIT_S = 900.0
RECORDS, EPOCHS = 20_000, 5
VERSIONS = EPOCHS * -(-RECORDS // 512)
JOB = {"MODEL": "examples/minimal.py", "EPOCHS": f"{EPOCHS}", "MICRO_BATCH_SIZE": "256", "GRADS_TO_WAIT": "2"}
#: Manifest -> roles of which something is killed.
MANIFESTS = {"complete": ("redis", "master", "workers"), "stores": ("store", "master", "workers")}
KILLS = 3


def docker(*words: str) -> str:
    ran = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, f"docker {' '.join(words)}: {ran.stderr}"
    return ran.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    """Those that the manifests name, of deploy/base-images.sh and deploy/Dockerfile."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no Docker engine answers")
    for image in ("redis:7", "elastable:0.1.0"):
        docker("image", "inspect", image)


def documents(manifest: str, home: Path) -> list[Parsed]:
    """What kubectl makes of an overlay, with the job of the test in its ConfigMap."""
    home.mkdir(parents=True, exist_ok=True)
    base = home / "base"
    shutil.copytree(FOLDER, base, dirs_exist_ok=True)
    settings = {"name": "elastable-job", "behavior": "merge", "literals": [f"{name}={JOB[name]}" for name in JOB]}
    whole = {"resources": [f"base/overlays/{manifest}"], "configMapGenerator": [settings]}
    (home / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    command = ["kubectl", "kustomize", str(home)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return list(yaml.safe_load_all(ran.stdout))


@dataclass
class Pod:
    """A pod that is to be there: its name, by which names others call it, and what it is.

    Attributes:
        owner: The Job or StatefulSet.
        number: Of its containers so far.
        done: Whether no other takes its place any more.
        address: In the network.
    """

    name: str
    called: tuple[str, ...]
    owner: Parsed
    number: int = 0
    done: bool = False
    address: str = ""

    @property
    def role(self) -> str:
        return str(self.owner["metadata"]["name"]).removeprefix("elastable-")

    @property
    def spec(self) -> Parsed:
        return self.owner["spec"]["template"]["spec"]


class Pods:
    """The pods of some documents, in a network of their own."""

    def __init__(self, found: list[Parsed]) -> None:
        self.network = f"elastable-test-{uuid.uuid4().hex[:8]}"
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()  # container and exit code, a line each
        self.succeeded: set[str] = set()  # roles
        self.pods: list[Pod] = []
        self._settings = {one["metadata"]["name"]: one["data"] for one in found if one["kind"] == "ConfigMap"}
        self._volumes: dict[str, int] = {}
        for one in found:
            if one["kind"] in ("Job", "StatefulSet"):
                name, labels = one["metadata"]["name"], one["spec"]["template"]["metadata"]["labels"]
                services = [
                    service["metadata"]["name"]
                    for service in found
                    if service["kind"] == "Service" and service["spec"]["selector"].items() <= labels.items()
                ]
                for number in range(one["spec"].get("replicas", one["spec"].get("parallelism", 1))):
                    own = [f"{name}-{number}.{service}" for service in services]
                    self.pods.append(Pod(f"{name}-{number}", (*services, *own), one))

    def container(self, pod: Pod) -> str:
        return f"{self.network}-{pod.name}-{pod.number}"

    def start(self, pod: Pod) -> None:
        """As the kubelet does it; a pod in the place of another has its name, and begins with empty folders."""
        if pod.number:
            docker("rm", "--force", self.container(pod))
        pod.number += 1
        (container,) = pod.spec["containers"]
        given, security = pod.spec["securityContext"], container["securityContext"]
        words = ["run", "--detach", "--name", self.container(pod), "--hostname", pod.name, "--network", self.network]
        words += [f"--network-alias={name}" for name in pod.called]
        words += [
            f"--user={given['runAsUser']}:{given['runAsGroup']}",
            f"--group-add={given.get('fsGroup', given['runAsGroup'])}",
        ]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        words += ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        words += [f"--memory={container['resources']['limits']['memory'].replace('Gi', 'g')}"]
        environment = self._environment(container)
        words += [f"--env={name}={value}" for name, value in environment.items()]
        words += [f"--mount={self._mount(pod, mount)}" for mount in container["volumeMounts"]]
        first: str = container["command"][0]
        rest: list[str] = [*container["command"][1:], *container.get("args", ())]
        named = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in rest]
        docker(*words, f"--entrypoint={first}", container["image"], *named)
        where = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        pod.address = docker("inspect", f"--format={where}", self.container(pod))

    def _environment(self, container: Parsed) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in container.get("envFrom", ()):
            found |= self._settings[each["configMapRef"]["name"]]
        for each in container.get("env", ()):
            secret = each.get("valueFrom", {}).get("secretKeyRef")
            found[each["name"]] = each["value"] if secret is None else f"secret-{secret['key']}"
        return found

    def _mount(self, pod: Pod, mount: Parsed) -> str:
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]] or [{}]
        if "emptyDir" in volume:
            return f"type=tmpfs,destination={mount['mountPath']},tmpfs-mode=1777"
        claim = volume["persistentVolumeClaim"]["claimName"] if volume else f"{mount['name']}-{pod.name}"
        source = self._volume(claim, pod.spec["securityContext"]["fsGroup"])
        return f"type=volume,source={source},destination={mount['mountPath']}"

    def _volume(self, claim: str, group: int) -> str:
        """A volume that belongs to the group, as the kubelet gives it."""
        name = f"{self.network}-{claim}"
        if name not in self._volumes:
            self._volumes[name] = group
            docker("volume", "create", name)
            words = ("run", "--rm", "--user=0", f"--volume={name}:/of", "--entrypoint=sh", "elastable:0.1.0", "-c")
            docker(*words, f"chgrp {group} /of && chmod 2775 /of")
        return name

    def look(self) -> None:
        """Puts another in the place of a pod that ends in the next moment, as its controller does."""
        with suppress(queue.Empty):
            container, code = self.ended.get(timeout=0.2).split()
            for pod in self.pods:
                if container == self.container(pod) and not pod.done:
                    self._replace(pod, int(code))

    def _replace(self, pod: Pod, code: int) -> None:
        if pod.owner["kind"] == "Job":
            rule = pod.owner["spec"]["podFailurePolicy"]["rules"][-1]
            assert code not in rule["onExitCodes"]["values"], self.logs(pod)
            if code == 0:  # of a Job without `completions` no pod is started any more
                pod.done = True
                self.succeeded.add(pod.role)
                return
            assert pod.number <= pod.owner["spec"]["backoffLimit"]
            if pod.role in self.succeeded:
                pod.done = True
                return
        self.start(pod)

    def logs(self, pod: Pod) -> str:
        ran = subprocess.run(
            ["docker", "logs", "--tail=40", self.container(pod)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return f"{pod.name}:\n{ran.stdout}\n{ran.stderr}"

    def struck(self, pod: Pod, notice: bool) -> bool:
        """Kills a pod, or gives it notice, as a node that is drained does; whether it was there."""
        if docker("inspect", "--format={{.State.Running}}", self.container(pod)) != "true":
            return False
        grace = pod.spec["terminationGracePeriodSeconds"]
        docker(*(("stop", f"--time={grace}") if notice else ("kill",)), self.container(pod))
        return True

    def version(self) -> int:
        """That the master has made, as far as one is there that answers; -1: none, for now."""
        (master,) = [pod for pod in self.pods if pod.role == "master"]
        with suppress(ElastableError), MasterClient(f"{master.address or '127.0.0.1'}:50051", 5.0) as client:
            return client.status().version
        return -1

    def all_done(self, role: str) -> bool:
        """Whether no pod of a role is there any more, and none to be."""
        self.look()
        return all(pod.done for pod in self.pods if pod.role == role)

    def file(self, path: str, home: Path) -> Path:
        """A copy of what the claim of runs has."""
        words = ["docker", "run", "--rm", f"--volume={self.network}-elastable-runs:/runs", "--entrypoint=tar"]
        ran = subprocess.run(
            [*words, "elastable:0.1.0", "-C", "/runs", "-ch", path], capture_output=True, timeout=300, check=True
        )
        with tarfile.open(fileobj=io.BytesIO(ran.stdout)) as packed:
            packed.extractall(home, filter="data")
        return home / path

    def remove(self) -> None:
        for pod in self.pods:
            docker("rm", "--force", "--volumes", self.container(pod))
        for volume in self._volumes:
            docker("volume", "rm", volume)
        docker("network", "rm", self.network)


@contextmanager
def applied(manifest: str, home: Path) -> Iterator[Pods]:
    pods = Pods(documents(manifest, home / "manifest"))
    told = "{{.Actor.Attributes.name}} {{.Actor.Attributes.exitCode}}"
    words = ["docker", "events", "--filter=event=die", "--filter=type=container", f"--format={told}"]
    docker("network", "create", pods.network)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as events:
        assert events.stdout is not None
        lines = events.stdout
        threading.Thread(target=lambda: deque(map(pods.ended.put, lines), 0), daemon=True).start()
        try:
            for pod in pods.pods:
                pods.start(pod)
            yield pods
        finally:
            events.terminate()
            pods.remove()


def result(pods: Pods, home: Path) -> Checkpoint:
    """The last checkpoint of a job that has made all its versions."""
    assert json.loads(pods.file("latest/result.json", home).read_text())["version"] == VERSIONS
    return open_checkpoint(sorted(pods.file("checkpoints", home).glob("ckpt-*"))[-1])


def trained(manifest: str, home: Path, seed: int | None) -> Checkpoint:
    chance = random.Random(f"{manifest}/{seed}")
    places = sorted(chance.sample(range(VERSIONS // 20, VERSIONS * 4 // 5), 0 if seed is None else KILLS))
    strikes = [(place, chance.choice(MANIFESTS[manifest]), chance.random(), chance.random() < 0.5) for place in places]
    struck: list[str] = []
    with applied(manifest, home) as pods:

        def looked() -> bool:
            if len(struck) < len(strikes) and pods.version() >= strikes[len(struck)][0]:
                place, role, which, notice = strikes[len(struck)]
                there = [pod for pod in pods.pods if pod.role == role]
                pod = there[int(which * len(there))]
                if pods.struck(pod, notice):
                    struck.append(f"{pod.name} {'told to leave' if notice else 'killed'} at {place}")
            return pods.all_done("master")

        try:
            until(looked, LIMIT_S)
            until(lambda: pods.all_done("workers"), LIMIT_S)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *struck, *map(pods.logs, pods.pods)])) from error
        print(f"{manifest} {seed}: {'; '.join(struck) or 'undisturbed'}")
        assert len(struck) == len(strikes), struck
        return result(pods, home / "result")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: trained(name, tmp_path_factory.mktemp(name), None) for name in MANIFESTS}


@pytest.mark.parametrize("seed", range(30))
def test_killed_pods_are_replaced_and_the_bits_are_those_of_an_undisturbed_job(
    seed: int, undisturbed: dict[str, Checkpoint], tmp_path: Path
) -> None:
    manifest = sorted(MANIFESTS)[seed % len(MANIFESTS)]
    assert_same(trained(manifest, tmp_path, seed), undisturbed[manifest])
