"""A client in another language, which knows proto/ alone, at a real parameter server."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import IndexedSlices, InitializerSpec, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from tests.embedding_store.serving import client_service

pytestmark = pytest.mark.process

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
LIMIT_S = 300
IDS = np.array([1, 2, 9007199254740993])  # the last one is no number of JavaScript


@pytest.fixture(scope="module")
def client() -> Path:
    """The client, beside the packages that it needs."""
    folder = ROOT / ".cache" / "javascript"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("client.js", "package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    if not (folder / "node_modules").exists():
        command = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"Node.js, npm and its packages are not here: {error}")
    return folder / "client.js"


def test_javascript_creates_looks_up_pushes_and_is_refused(client: Path) -> None:
    with MemoryStore() as store, GrpcServer("127.0.0.1:0", [client_service(store)]) as server:
        command = ("node", str(client), server.address, str(ROOT / "proto"))
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    adam = OptimizerSpec.of("adam", learning_rate=0.1)
    with MemoryStore() as expected:
        table = expected.table(
            TableSpec("users", 4, initializer=InitializerSpec("uniform", -0.05, 0.05), optimizer=adam)
        )
        before = table.lookup(IDS)
        table.update(None, IndexedSlices(np.ones((3, 4), np.float32), np.array([1, 1, 2])))
        np.testing.assert_array_equal(np.float32(said["before"]), before.reshape(-1))
        np.testing.assert_array_equal(np.float32(said["after"]), table.lookup(IDS).reshape(-1))
    assert said["created"] is True
    pushed = [(reply["outcome"], reply["version"]) for reply in said["pushed"]]
    assert pushed == [("OUTCOME_ACCEPTED", "1"), ("OUTCOME_DUPLICATE", "1")]
    assert said["many"] == 4 * 200_000
    not_finite, short = said["refused"]
    assert not_finite.startswith("INVALID_ARGUMENT: table 'users': the gradient of id 1 (position 0) is nan")
    assert short == "INVALID_ARGUMENT: RowPush: the body ended after 20 of the 24 bytes that its header declares"
