"""A job whose shard is killed: one error that names the shard, one exit code, whatever the moment."""

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.open_store import open_store
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.process.exit_codes import ExitCode
from tests.elastable.jobs.resuming.test_partial_loss import resume
from tests.elastable.processes import CLICK_JOB, Hold, Running, elastable
from tests.master.checkpoints.jobs import DYNAMIC, FIXED, created, dense_of, progress_of, rows, train
from tests.master.checkpoints.jobs import JOB as SAVED
from tests.ports import free_address
from tests.servers import running_server

LAST_OF_EPOCH = 20  # behind it the epoch is evaluated, and nobody commits
JOB = ("--epochs", "2", "--micro-batch-size", "32", "--grads-to-wait", "2", "--no-export", "--deadline", "8")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("version", "comes_back_empty"),
    [
        pytest.param(10, False, marks=pytest.mark.slow),  # tests/elastable/jobs/test_store_watch.py has the errors
        pytest.param(10, True, marks=pytest.mark.slow),
        pytest.param(LAST_OF_EPOCH, False, marks=pytest.mark.slow),
        (LAST_OF_EPOCH, True),
    ],
)
def test_a_killed_shard_ends_the_job_by_name(tmp_path: Path, version: int, comes_back_empty: bool) -> None:
    addresses = [free_address() for _ in range(3)]
    with ExitStack() as processes:

        def start(name: str, *arguments: str, env: dict[str, str] | None = None) -> Running:
            return processes.enter_context(elastable(tmp_path, *arguments, env=env, name=name))

        shards = [start(f"shard{n}", "store", "--listen", address) for n, address in enumerate(addresses[:2])]
        for shard in shards:
            shard.address()
        hold, stores = Hold(tmp_path / "hold", version), f"{addresses[0]},{addresses[1]}"
        job = ("master", str(CLICK_JOB), *JOB, "--stores", stores, "--run-dir", str(tmp_path / "runs"))
        master = start("master", *job, "--listen", addresses[2], env=hold.environment)
        worker = start("worker", "worker", str(CLICK_JOB), "--master", addresses[2], "--deadline", "60")
        hold.wait(master)
        shards[1].signal(signal.SIGKILL)
        shards[1].wait()
        if comes_back_empty:
            start("shard1-again", "store", "--listen", addresses[1]).address()
        hold.go()
        codes = master.wait(), worker.wait()
        shards[0].signal(signal.SIGTERM)
        assert shards[0].wait() == ExitCode.DONE, shards[0].err
    assert codes == (ExitCode.STORE_FAILED, ExitCode.STORE_FAILED), f"{master.err}\n{worker.err}"
    for ended in (master, worker):
        assert re.search(r"^ShardLost: .*shard 1 of 2", ended.err, re.MULTILINE), ended.err


def test_a_job_goes_on_from_its_checkpoint_where_a_shard_has_lost_its_rows(server_binary: Path, tmp_path: Path) -> None:
    """None of the rows that the other shard still holds, which are younger than the checkpoint, is left."""
    with running_server(server_binary, tmp_path / "redis") as server:

        def opened() -> PartitionedStore:
            return PartitionedStore([open_store(f"{server.url}?namespace=shard{n}&partitions=2") for n in range(2)])

        with opened() as store:
            created(store, (FIXED, DYNAMIC))
            train(store, 3)
            saved = rows(store)
            write_checkpoint(tmp_path / "kept", store, dense_of(3), SAVED, progress_of(3))
            train(store, 4, most=400)
            assert set(rows(store)) > set(saved)
        with server.client() as client:
            client.delete(*client.scan_iter("{shard1:*"), *client.scan_iter("{shard1}:*"))
        with opened() as store:
            begun = resume(store, tmp_path / "kept", (FIXED, DYNAMIC))
            assert begun.checkpoint is not None
            assert rows(store) == saved
            assert store.version() == 3
            train(store, 1)
            store.lookup({"fixed": np.arange(4)}, 4)
