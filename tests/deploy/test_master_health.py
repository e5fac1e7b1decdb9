"""The container's health check, run as it is, against servers with and without TLS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from tests.certificates import TOKEN, Authority

SCRIPT = Path(__file__).parents[2] / "deploy" / "master-health.py"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("health") / "tls")


def check(credentials: Credentials, **files: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the check against a server, with variables `ELASTABLE_TLS_...`."""
    variables = {f"ELASTABLE_TLS_{name}": str(file) for name, file in files.items()}
    with GrpcServer("127.0.0.1:0", [], credentials=credentials) as server:
        return subprocess.run(
            [sys.executable, str(SCRIPT), server.address],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def test_a_server_in_plain_text_with_a_token() -> None:
    ran = check(Credentials(token=TOKEN), CA="", CERT="", KEY="")
    assert ran.returncode == 0, ran.stderr


def test_mutual_tls(authority: Authority) -> None:
    mutual = authority.mutual()
    ran = check(mutual, CA=authority.ca, CERT=str(mutual.certificate), KEY=str(mutual.key))
    assert ran.returncode == 0, ran.stderr
    assert (
        check(mutual, CA=authority.ca, CERT=str(mutual.certificate), KEY=str(mutual.key), NAME="other").returncode == 1
    )
    assert check(mutual, CA=authority.ca).returncode == 1
    assert check(mutual).returncode == 1


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
