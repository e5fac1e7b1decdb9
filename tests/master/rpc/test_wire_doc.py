"""docs/extending.md: its client is run as it is written there, and what it says of services and limits is so."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.support.array_body import MAX_BODY_BYTES
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import MAX_FRAME_BYTES, ONE_FRAME_BYTES
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.master.api import JobSpec
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.master.rpc.master_service import master_service
from elastable.master.rpc.messages import MASTER_SERVICE
from elastable.master.v1 import master_pb2
from tests.embedding_store.serving import client_service
from tests.pages.blocks import blocks_of

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "extending.md"


def block(mark: str) -> str:
    """The first block of the page with that mark."""
    return next(block.text for block in blocks_of(PAGE) if block.mark == mark)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    master = Master(JobSpec(train_records=9), MemoryStore(), DensePart())
    job = replace(master_service(master), not_ready=lambda: None)
    with (
        MemoryStore() as store,
        GrpcServer("127.0.0.1:0", [client_service(store), job]) as server,
    ):
        yield server.address


@pytest.fixture(scope="module")
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def run_client(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the page's client where nothing of the repository but the generated stubs can be imported."""
    target = folder / "elastable" / "embedding_store" / "v1"
    target.mkdir(parents=True)
    for stub in (ROOT / "embedding_store" / "v1").glob("*.py"):
        (target / stub.name).write_text(stub.read_text())
    client = folder / "client.py"
    client.write_text(block("file client.py"))
    return subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(client), *arguments],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


RUN = """
import runpy, sys
folder, sys.argv = sys.argv[1], sys.argv[2:]
sys.path.insert(0, folder)
# Nor from where it is installed, in whatever way that was done.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
runpy.run_path(sys.argv[0], run_name="__main__")
ours = [name for name in sys.modules if name.split(".")[0] == "elastable"]
assert all(getattr(sys.modules[name], "__file__", None) is None or sys.modules[name].__file__.startswith(folder)
           for name in ours), ours
"""


def test_the_pages_client_runs_as_it_is_written(address: str, tmp_path: Path) -> None:
    ran = run_client(tmp_path / "first", address)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == block("output")
    ran = run_client(tmp_path / "again", ELASTABLE_ADDRESS=address)
    assert ran.returncode == 0, ran.stderr
    assert "rows are the new ones" in ran.stdout


def test_health_answers_for_both_services(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", STORE_SERVICE, MASTER_SERVICE):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_shows_both_services_and_all_their_calls(channel: grpc.Channel) -> None:
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in (STORE_SERVICE, MASTER_SERVICE)
    ]
    listed, *files = ask(iter(requests), timeout=60)
    assert {STORE_SERVICE, MASTER_SERVICE} < {service.name for service in listed.list_services_response.service}
    for file, call in zip(files, (b"LookupSmall", b"ReportGradient"), strict=True):
        assert any(call in text for text in file.file_descriptor_response.file_descriptor_proto)


def test_the_page_names_every_service() -> None:
    for file in (store_pb2.DESCRIPTOR, master_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            assert f"[`{service.full_name}`](../proto/{file.name})" in PAGE.read_text()


def test_the_page_says_the_limits() -> None:
    for size, words in ((MAX_FRAME_BYTES, "4 MiB"), (MAX_BODY_BYTES, "4 GiB"), (ONE_FRAME_BYTES, "3.5 MiB")):
        amount, unit = words.split()
        assert size == float(amount) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
        assert words in PAGE.read_text()
