"""The generated stubs in the tree are what the protos generate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PROTOS = tuple(
    f"elastable/{name}.proto" for name in ("embedding_store/v1/store", "master/v1/master", "serving/v1/inference")
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is part of the dev extra")
    folder = tmp_path_factory.mktemp("stubs")
    outputs = [f"--{kind}={folder}" for kind in ("python_out", "mypy_out", "grpc_python_out", "mypy_grpc_out")]
    # protoc finds the mypy plugins next to the interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *PROTOS],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder


@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"])
@pytest.mark.parametrize("proto", PROTOS)
def test_the_stubs_are_current(generated: Path, proto: str, suffix: str) -> None:
    name = proto.removesuffix(".proto") + suffix
    assert (ROOT / name).read_text() == (generated / name).read_text(), f"{name} is stale: run `make proto`"


def test_no_stub_is_left_of_a_proto_that_is_gone() -> None:
    stubs = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("elastable/*/v1/*_pb2.py")}
    assert stubs == {proto.removesuffix(".proto") + "_pb2.py" for proto in PROTOS}
    assert {path.relative_to(ROOT / "proto").as_posix() for path in (ROOT / "proto").rglob("*.proto")} == set(PROTOS)
