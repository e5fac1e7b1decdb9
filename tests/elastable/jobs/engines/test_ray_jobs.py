"""Jobs on a real Ray of this machine: the bits of local processes, whatever is killed, and nothing left behind."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastable.embedding_store.errors import ElastableError
from elastable.master.api import JobStatus
from elastable.master.rpc.client import MasterClient
from elastable.process.exit_codes import ExitCode
from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB, LIMIT_S, Hold, Running, elastable, run_elastable, wait_until
from tests.ports import free_port
from tests.waiting import until

#: `click_job`, at a pace at which something can be killed in its middle; HELD: folders "5" and "25", as its HOLD.
PACED = """
import os
import time
from pathlib import Path
import elastable as et
import click_job
from click_job import *

HELD = os.environ.get("ELASTABLE_TEST_HELD")

class Slow(et.NumpyReader):
    def take(self, indices):
        time.sleep(0.5 if HELD else 0.1)
        return super().take(indices)

def data(split):
    return Slow(*click_job.data(split))

def callbacks():
    return [click_job.Hold(Path(HELD) / f"{at}", at) for at in (5, 25)] if HELD else []
"""
#: `click_job`, whose records are a Ray Dataset; ORDER=drawn: in an order that every process draws anew.
DATASET = """
import os
import ray.data
import elastable as et
import click_job
from click_job import *

def data(split):
    x, y = click_job.data(split)
    rows = ray.data.from_items([dict(user_ids=u, word_ids=w, y=v) for u, w, v in zip(x["user_ids"], x["word_ids"], y)])
    if os.environ.get("ELASTABLE_TEST_ORDER") == "drawn" and split == "train":
        rows = rows.random_shuffle()
    return et.RayDataReader(rows, label="y")
"""
#: A notebook: two fits of arrays in this process, and of a file on a cluster (URL, FOLDER), to the same bits.
NOTEBOOK = """
import sys
import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import elastable as et
import click_job
from elastable.master.backend.contract import backend

url, folder = sys.argv[1:]
backend().set_threads(1)  # as in a job
validation = click_job.data("validation")
(x, y), made = click_job.data("train"), []
columns = {"user_ids": x["user_ids"], "word_ids": pa.FixedSizeListArray.from_arrays(x["word_ids"].ravel(), 3), "y": y}
pq.write_table(pa.table(columns), f"{folder}/clicks.parquet")
how = dict(batch_size=32, grads_to_wait=2, epochs=3, seed=7, verbose=2, validation_data=validation)
cluster = {"checkpoint_dir": folder, "checkpoint_every": 5, "run_dir": f"{folder}/runs", "insecure": True, "stores": 2}
for on, first in ((None, (x, y)), (url, et.ParquetReader(f"{folder}/clicks.parquet", label="y"))):
    keras.utils.set_random_seed(3)
    model = click_job.model()
    there = {} if on is None else {"on": on, "cluster": {**cluster, "deadline_s": 240.0}}
    fits = [et.fit(model, first, **how, **there), et.fit(model, x, y, **how, **there)]
    ids = {"users": np.arange(50), "words": np.unique(x["word_ids"])}
    rows = [layer.read_rows(ids[layer.name]) for layer in model.layers if layer.name in ids]
    dense = [each.numpy() for each in model.optimizer.variables]
    # Not the state of dropout: it draws by the job's seed and the micro-batch.
    dense += [each.numpy() for layer in model.layers if layer.name not in ids for each in layer.weights]
    scores = model.predict(validation[0], verbose=0)
    made.append(([(fit.epoch, fit.history) for fit in fits], [*rows, *dense, scores]))
(histories, arrays), (others, back) = made
assert histories == others, (histories, others)
assert len(arrays) == len(back) > 20
for one, other in zip(arrays, back):
    assert np.array_equal(one, other)
print("the same bits")
"""
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled"}
KILLS = 4


@dataclass(frozen=True)
class Cluster:
    """A Ray of one node with room for sixteen processes.

    Attributes:
        home: Below which all its files lie, and the model.
        url: As `--on` takes it.
        gcs: Where its other nodes find it.
    """

    home: Path
    url: str
    gcs: str = ""

    @property
    def model(self) -> Path:
        return self.home / "job" / "paced_job.py"

    def processes(self, role: str) -> list[int]:
        """Process ids of `elastable ROLE` that Ray runs here, in no order."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if words[1:4] == ["-m", "elastable", role] and str(self.home) in " ".join(words):
                    found.append(int(folder.name))
        return sorted(found)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Below which all files of a Ray lie: those of its sockets may have no long paths."""
    home = Path(tempfile.mkdtemp(prefix="ray-"))
    (home / "job").mkdir()
    shutil.copy(CLICK_JOB, home / "job")
    (home / "job" / "paced_job.py").write_text(PACED)
    (home / "job" / "dataset_job.py").write_text(DATASET)
    (home / "job" / "notebook.py").write_text(NOTEBOOK)
    yield home
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def node(home: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A node of a Ray, and what it said when it had begun; it ends with the block."""
    said = home / f"node-{len(list(home.glob('node-*')))}.log"
    paths = {"PYTHONPATH": str(Path(__file__).parents[4]), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "2"}
    words = ("--block", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0", *words)
    with said.open("wb") as out:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address=127.0.0.1", *words]
        started = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**os.environ, **ENVIRONMENT, **paths},
            start_new_session=True,
            cwd=home,
        )
    try:
        until(lambda: b"Ray runtime started" in said.read_bytes() or started.poll() is not None, 240.0)
        assert started.poll() is None, said.read_text()
        yield started, said.read_text()
    finally:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(60)


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Cluster]:
    port, gcs = free_port(), free_port()
    words = ["--head", "--num-cpus=16", "--include-dashboard=false", f"--temp-dir={home}/ray"]
    try:
        with node(home, *words, f"--port={gcs}", f"--ray-client-server-port={port}") as (_, said):
            host = re.search(r"--address='(\S+):\d+'", said)
            assert host, said
            yield Cluster(home, f"ray://{host[1]}:{port}", f"{host[1]}:{gcs}")
    finally:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if str(home) in (folder / "cmdline").read_text(errors="replace"):
                    os.kill(int(folder.name), signal.SIGKILL)


def words_of(cluster: Cluster, home: Path, *more: str | Path) -> list[str | Path]:
    on = ("--on", cluster.url, "--insecure", "--run-dir", home / "runs", "--checkpoint-dir", home / "ckpts")
    return ["train", cluster.model, "--workers", "2", *JOB, *on, "--no-export", "--deadline", "240", *more]


def until_version(job: Running, version: int, limit_s: float = LIMIT_S) -> None:
    """Returns once the job's master, wherever it is by then, has made the version."""

    def reached() -> bool:
        addresses = re.findall(r"master at (\S+), store", job.out)
        if job.process.poll() is not None or not addresses:
            return job.process.poll() is not None
        try:
            with MasterClient(addresses[-1], 2.0) as master:
                return master.status().version >= version
        except ElastableError:
            return False  # it is on its way

    wait_until(reached, f"version {version}", job, limit_s)
    assert job.process.poll() is None, f"{job.out}\n{job.err}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(30))
def test_killed_actors_come_back_and_the_bits_are_those_of_an_undisturbed_job(
    seed: int, cluster: Cluster, tmp_path: Path, trained: Trained
) -> None:
    """Of a seeded schedule: which role, at which version, and whether its process dies, or its actor, or has notice."""
    drawn = random.Random(seed)
    roles = [*drawn.sample(["master", "store", "worker"], 3), drawn.choice(["master", "store"])]
    versions = sorted(drawn.sample(range(2, 36), KILLS))
    store = ("--stores", "2", "--store", f"memory?log={cluster.home}/logs-{seed}")
    with elastable(tmp_path, *words_of(cluster, tmp_path, *store), env=ENVIRONMENT, new=True) as job:
        for role, version in zip(roles, versions, strict=True):
            until_version(job, version)
            victim = drawn.choice(cluster.processes(role))
            actor = int(Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[1])
            # Or its node is about to be taken away.
            os.kill(*drawn.choice([(victim, signal.SIGKILL), (actor, signal.SIGKILL), (actor, signal.SIGTERM)]))
        assert job.wait() == 0, f"{roles} at {versions}: {job.out}\n{job.err}"
    trained.require_same_numbers(tmp_path / "ckpts" / "ckpt-0000000040")
    assert not [role for role in ("master", "store", "worker") if cluster.processes(role)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nodes_that_join_get_workers_and_what_these_have_not_done_is_given_back_at_once_when_the_nodes_go(
    cluster: Cluster, tmp_path: Path, trained: Trained
) -> None:
    # Two of four workers have room beside the master: 1 + 2 x 6 CPUs of 16. No lease ends in time.
    elastic = ("--workers", "2:4", "--worker-cpus", "6", "--lease", "3600")
    environment = {**ENVIRONMENT, "ELASTABLE_TEST_HELD": str(tmp_path)}
    # With a folder of its own, as a node on another machine has one.
    joining = (f"--address={cluster.gcs}", "--num-cpus=12", f"--temp-dir={cluster.home}/ray-too")
    holds = [Hold(tmp_path / f"{version}", version) for version in (5, 25)]
    for hold in holds:
        hold.home.mkdir()

    def status() -> JobStatus:
        with MasterClient(re.findall(r"master at (\S+), store", job.out)[-1], LIMIT_S) as master:
            return master.status()

    with elastable(tmp_path, *words_of(cluster, tmp_path, *elastic), env=environment, new=True) as job:
        holds[0].wait(job)
        assert len(status().workers) == 2
        with node(cluster.home, *joining) as (added, _):
            wait_until(lambda: len(status().workers) == 4, "workers on the node that joined", job)
            holds[0].go()
            wait_until(lambda: all(it.micro_batches for it in status().workers), "micro-batches of all", job)
            added.terminate()
            wait_until(lambda: len(status().gone) == 2, "end of its workers", job)
        holds[1].wait(job)
        with node(cluster.home, *joining):
            wait_until(lambda: len(status().workers) == 4, "workers on another node", job)
            holds[1].go()
            assert job.wait() == 0, f"{job.out}\n{job.err}"
    trained.require_same_numbers(tmp_path / "ckpts" / "ckpt-0000000040")


@contextmanager
def notebook(cluster: Cluster, home: Path) -> Iterator[Running]:
    """A process that calls `et.fit(on=)` twice."""
    files = home / "notebook.out", home / "notebook.err"
    words = [sys.executable, "-u", str(cluster.home / "job" / "notebook.py"), cluster.url, str(home)]
    paths = {"PYTHONPATH": str(Path(__file__).parents[4])}
    with files[0].open("wb") as out, files[1].open("wb") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, cwd=home, env={**os.environ, **ENVIRONMENT, **paths})
    try:
        yield Running(process, *files)
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_fit_from_a_notebook_has_the_bits_of_one_process_whatever_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    with notebook(cluster, tmp_path) as fits:
        for role, version in (("worker", 8), ("master", 20), ("worker", 35)):
            until_version(fits, version, 2 * LIMIT_S)
            os.kill(cluster.processes(role)[0], signal.SIGKILL)
        assert fits.wait(1200) == 0, f"{fits.out}\n{fits.err}"
        assert fits.out.endswith("the same bits\n"), fits.out
    assert not [role for role in ("master", "store", "worker") if cluster.processes(role)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_in_a_notebook_ends_all_of_it(cluster: Cluster, tmp_path: Path) -> None:
    with notebook(cluster, tmp_path) as fits:
        until_version(fits, 5, 2 * LIMIT_S)
        fits.signal(signal.SIGINT)
        assert fits.wait() != 0
        assert fits.err.rstrip().endswith("KeyboardInterrupt"), fits.err
    assert not [role for role in ("master", "store", "worker") if cluster.processes(role)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_ends_all_of_it_and_the_job_goes_on_with_local_processes(
    cluster: Cluster, tmp_path: Path, trained: Trained
) -> None:
    with elastable(tmp_path, *words_of(cluster, tmp_path), env=ENVIRONMENT, new=True) as job:
        until_version(job, 5)
        job.signal(signal.SIGINT)
        assert job.wait() == ExitCode.INTERRUPTED, f"{job.out}\n{job.err}"
    assert not [role for role in ("master", "worker") if cluster.processes(role)]
    (line,) = [line for line in job.out.splitlines() if line.startswith("elastable train ")]
    assert f"--on {cluster.url}" in line
    assert line.endswith(f"--resume --checkpoint-dir {tmp_path}/ckpts")
    ran = run_elastable(
        "train", cluster.model, "--workers", "2", *JOB, "--run-dir", tmp_path / "runs", "--resume",
        "--checkpoint-dir", tmp_path / "ckpts", "--no-export",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "resuming at version" in ran.out
    trained.require_same_numbers(tmp_path / "ckpts" / "ckpt-0000000040")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_workers_than_there_is_room_for_wait_and_a_wrong_model_ends_with_its_exit_code(
    cluster: Cluster, tmp_path: Path, trained: Trained
) -> None:
    # Two of eight workers have room beside the master: 1 + 2 x 6 CPUs of 16.
    elastic = ("--workers", "2:8", "--worker-cpus", "6")
    ran = run_elastable(*words_of(cluster, tmp_path, *elastic), env=ENVIRONMENT, new=True)
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    trained.require_same_numbers(tmp_path / "ckpts" / "ckpt-0000000040")
    wrong = cluster.home / "job" / "wrong.py"
    wrong.write_text("def model():\n    return None\n\ndef data(split):\n    return None\n")
    words = words_of(cluster, tmp_path / "wrong")
    words[1] = wrong
    ran = run_elastable(*words, env=ENVIRONMENT, new=True)
    assert ran.code == ExitCode.BAD_MODEL, f"{ran.out}\n{ran.err}"
    assert "there is nothing to train on" in ran.out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ray_dataset_is_trained_to_the_bits_of_arrays_or_refused_where_its_order_is_drawn(
    cluster: Cluster, tmp_path: Path, trained: Trained
) -> None:
    words = words_of(cluster, tmp_path)
    words[1] = cluster.home / "job" / "dataset_job.py"
    ran = run_elastable(*words, env=ENVIRONMENT, new=True)
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    trained.require_same_numbers(tmp_path / "ckpts" / "ckpt-0000000040")
    words = words_of(cluster, tmp_path / "drawn")
    words[1] = cluster.home / "job" / "dataset_job.py"
    ran = run_elastable(*words, env={**ENVIRONMENT, "ELASTABLE_TEST_ORDER": "drawn"}, new=True)
    assert ran.code == ExitCode.BAD_INPUT, f"{ran.out}\n{ran.err}"
    assert "holds other records here than at the master" in " ".join(ran.err.split())


@pytest.mark.slow
def test_what_a_cluster_has_no_room_for_is_named(cluster: Cluster, tmp_path: Path) -> None:
    words = words_of(cluster, tmp_path, "--worker-gpus", "1", "--deadline", "3")
    ran = run_elastable(*words, env=ENVIRONMENT, new=True)
    assert ran.code == ExitCode.UNAVAILABLE, f"{ran.out}\n{ran.err}"
    assert re.search(r"no room within 3 s for .*2 x worker with .*GPU.*1.*CPU 16, GPU 0", " ".join(ran.err.split()))
    ran = run_elastable(*[word for word in words if word != "--insecure"], env=ENVIRONMENT, new=True)
    assert ran.code == ExitCode.BAD_INPUT, f"{ran.out}\n{ran.err}"
    assert "would be open to everybody who reaches it" in " ".join(ran.err.split())


@pytest.mark.timeout(900)
def test_a_ray_that_the_job_starts_itself_ends_with_it(home: Path, tmp_path: Path, trained: Trained) -> None:
    words = words_of(Cluster(home, "ray"), tmp_path, "--stores", "2")
    ran = run_elastable(*words, env=ENVIRONMENT, new=True)
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    assert "master at 127.0.0.1:" in ran.out
    trained.require_same_numbers(tmp_path / "ckpts" / "ckpt-0000000040")
