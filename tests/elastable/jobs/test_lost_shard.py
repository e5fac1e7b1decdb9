"""A job whose shard is killed: one error that names the shard, one exit code, whatever the moment."""

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastable.process.exit_codes import ExitCode
from tests.elastable.processes import CLICK_JOB, Hold, Running, elastable
from tests.ports import free_address

LAST_OF_EPOCH = 20  # behind it the epoch is evaluated, and nobody commits
JOB = ("--epochs", "2", "--micro-batch-size", "32", "--grads-to-wait", "2", "--no-export", "--deadline", "8")


# test_store_watch.py has the errors, and tests/equality/test_store_server_faults.py loses rows in mid-epoch.
@pytest.mark.timeout(900)
def test_a_killed_shard_that_comes_back_empty_ends_the_job_by_name(tmp_path: Path) -> None:
    addresses = [free_address() for _ in range(3)]
    with ExitStack() as processes:

        def start(name: str, *arguments: str, env: dict[str, str] | None = None) -> Running:
            return processes.enter_context(elastable(tmp_path, *arguments, env=env, name=name))

        shards = [start(f"shard{n}", "store", "--listen", address) for n, address in enumerate(addresses[:2])]
        for shard in shards:
            shard.address()
        hold, stores = Hold(tmp_path / "hold", LAST_OF_EPOCH), f"{addresses[0]},{addresses[1]}"
        job = ("master", str(CLICK_JOB), *JOB, "--stores", stores, "--run-dir", str(tmp_path / "runs"))
        master = start("master", *job, "--listen", addresses[2], env=hold.environment)
        worker = start("worker", "worker", str(CLICK_JOB), "--master", addresses[2], "--deadline", "60")
        hold.wait(master)
        shards[1].signal(signal.SIGKILL)
        shards[1].wait()
        start("shard1-again", "store", "--listen", addresses[1]).address()
        hold.go()
        codes = master.wait(), worker.wait()
        shards[0].signal(signal.SIGTERM)
        assert shards[0].wait() == ExitCode.DONE, shards[0].err
    assert codes == (ExitCode.STORE_FAILED, ExitCode.STORE_FAILED), f"{master.err}\n{worker.err}"
    for ended in (master, worker):
        assert re.search(r"^ShardLost: .*shard 1 of 2", ended.err, re.MULTILINE), ended.err
