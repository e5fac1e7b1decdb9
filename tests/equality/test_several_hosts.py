"""Programs over three hosts: network namespaces joined by a bridge, with delay and loss where the kernel has netem."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints
from tests.elastable.processes import run_elastable
from tests.equality.hosts import Host, three_hosts
from tests.equality.jobs import MODEL, Numbers, differing, trained_numbers
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.process]

LIMIT_S = 400.0
PORT, STORE_PORT = 50051, 50061


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with three_hosts(tmp_path) as made:
        yield made


@pytest.mark.timeout(1200)
def test_a_job_over_three_hosts_trains_the_same_numbers(alone: Numbers, tmp_path: Path, hosts: list[Host]) -> None:
    """Master and a worker on one host, a store server and a worker on each of the others."""
    env = {**os.environ, "EQUALITY_OPTIMIZER": "adagrad", "EQUALITY_RANDOM": "1", "EQUALITY_VOCABULARY": "40"}
    env |= {"EQUALITY_PAUSE": "0", "EQUALITY_GATE": ""}
    for number, host in enumerate(hosts[1:]):
        log = tmp_path / f"store-{number}.log"
        host.start(log, "store", "--listen", f"{host.address}:{STORE_PORT}", "--insecure", env=env)
        until(lambda log=log: b"store server at" in log.read_bytes(), LIMIT_S)  # type: ignore[misc]
    where = f"{hosts[0].address}:{PORT}"
    words = ["master", str(MODEL), "--listen", where, "--insecure", "--micro-batch-size", "16", "--seed", "11"]
    words += ["--grads-to-wait", "4", "--run-dir", str(tmp_path), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    words += ["--no-export", "--stores", ",".join(f"{host.address}:{STORE_PORT}" for host in hosts[1:])]
    master = hosts[0].start(tmp_path / "master.log", *words, env=env)
    workers = [
        host.start(tmp_path / f"worker-{n}.log", "worker", str(MODEL), "--master", where, "--deadline", "120", env=env)
        for n, host in enumerate(hosts)
    ]
    assert master.wait(LIMIT_S) == 0, (tmp_path / "master.log").read_text()
    assert [worker.wait(LIMIT_S) for worker in workers] == [0, 0, 0]
    assert differing(alone, trained_numbers(tmp_path / "checkpoints")) == []


@pytest.mark.timeout(1200)
def test_host_embeddings_over_three_hosts_have_the_numbers_of_one(tmp_path: Path, hosts: list[Host]) -> None:
    """Members of a replica group on each host; they exchange rows and gradients over MPI."""
    program = ["-m", "tests.elastable.launch.host_embedding_program"]
    for folder in ("one", "three"):
        (tmp_path / folder).mkdir()
    over_hosts(hosts, tmp_path, *program, str(tmp_path / "three"))
    ran = run_elastable("replicas", "-n", "3", *program, tmp_path / "one")
    assert ran.code == 0, ran.err
    for rank in range(3):
        with np.load(tmp_path / "one" / f"{rank}.npz") as here, np.load(tmp_path / "three" / f"{rank}.npz") as there:
            assert differing(dict(here), dict(there)) == []


@pytest.mark.timeout(1200)
def test_a_knowledge_graph_is_trained_over_three_hosts_as_on_one(tmp_path: Path, hosts: list[Host]) -> None:
    graph = tmp_path / "ring"
    graph.mkdir()
    lines = [
        f"city-{k}\t{how}\tcity-{(k + far) % 24}" for how, far in (("next", 1), ("opposite", 12)) for k in range(24)
    ]
    for name, part in (("train", lines[:-6]), ("valid", lines[-6:-3]), ("test", lines[-3:])):
        (graph / f"{name}.txt").write_text("\n".join(part) + "\n")
    train = ["elastable", "kg", "train", str(graph), "--dim", "8", "--batch", "32", "--epochs", "2", "--run-dir"]
    over_hosts(hosts, tmp_path, *train, str(tmp_path / "three"))
    ran = run_elastable("replicas", "-n", "3", *train, tmp_path / "one")
    assert ran.code == 0, ran.err
    one, three = (
        dict(GraphCheckpoints(tmp_path / of / "latest" / "checkpoints").newest().state) for of in ("one", "three")
    )
    assert differing(one, three) == []


def over_hosts(hosts: list[Host], home: Path, *program: str) -> None:
    """Runs `elastable replicas` from the first host with a member on each."""
    words = ["replicas", "-n", "3", "--hosts", ",".join(host.name for host in hosts), "--deadline", "300", *program]
    process = hosts[0].start(home / "replicas.log", *words, env=os.environ)
    assert process.wait(LIMIT_S) == 0, (home / "replicas.log").read_text()
