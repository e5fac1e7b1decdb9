"""The contract of engines, on the one that every machine has; tests of Ray's are in `test_ray_jobs`."""

import os
import re
from pathlib import Path

import pytest

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.jobs.engines.engine import Command, LocalEngine
from elastable.jobs.engines.roles import start_stores
from elastable.jobs.options import StoreServerOptions
from elastable.process.exit_codes import ExitCode
from tests.waiting import until

pytestmark = pytest.mark.process
_LISTEN = "127.0.0.1:0"


def test_processes_say_where_they_are_hear_of_peers_and_end_with_the_block(tmp_path: Path) -> None:
    with start_stores(LocalEngine(tmp_path), 2, StoreServerOptions(listen=_LISTEN), {}) as stores:
        for number, address in enumerate(stores.addresses()):
            with ShardClient(address, 60.0) as client:
                assert client.version() == 0
            assert f"store server at {address}, store memory" in stores.end_of_log(number)
        stores.interrupt()
        until(lambda: all(seen.code == ExitCode.INTERRUPTED for seen in stores.look()))
        assert (len(stores.failed()), len(stores.newly_dead()), stores.newly_dead()) == (2, 2, [])
    with LocalEngine(tmp_path).start(
        "worker", [Command(["worker", "m.py"], (), {"--master": "master"})], 0, 60
    ) as them:
        (seen,) = them.look()
        line = Path(f"/proc/{seen.pid}/cmdline")
        until(lambda: "--master" in line.read_text())  # it is being put in the place of this process's copy
        words = line.read_text().split("\0")
        file = Path(words[words.index("--master") + 1].removeprefix("file://"))
        assert file.read_text() == ""
        them.tell("master", ["host-a:1", "host-b:2"])
        assert file.read_text() == "host-a:1,host-b:2"
    with pytest.raises(ProcessLookupError):
        os.kill(seen.pid, 0)


def test_one_that_does_not_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    options = StoreServerOptions(listen=_LISTEN, store=f"file://{tmp_path}/file/below")
    (tmp_path / "file").write_text("no folder")
    with start_stores(LocalEngine(tmp_path), 2, options, {}) as stores:
        said = (
            rf"store \d did not start; the last lines of {re.escape(str(tmp_path))}/store-\d.log:(?s:.*)cannot be used"
        )
        with pytest.raises(ElastableError, match=said):
            stores.addresses()
