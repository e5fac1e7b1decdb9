"""Addresses and URLs that cannot be are refused before anything starts."""

import socket
from pathlib import Path

import pytest
from rich.console import Console

from elastable.embedding_store.errors import BadInput
from elastable.jobs.master_process import run_job
from elastable.jobs.options import JobOptions, WorkerOptions
from elastable.jobs.worker_process import run_worker
from tests.elastable.processes import CLICK_JOB
from tests.untyped import Keywords


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "redis://h:1?namspace=x"}, "did you mean namespace"),
        ({"store": "file://relative"}, "three slashes"),
        ({"store": "disk"}, "store 'disk' is unknown"),
        ({"store": "token:memory,grpc://nowhere"}, "address 'nowhere'"),
        ({"http": "8080"}, "--http: address '8080': write host:port"),
        ({"listen": "here"}, "--listen: address 'here': write host:port"),
        ({"full_every": 0}, "--full-every 0: must be at least 1"),
        ({"warm_tables": ("users",)}, "--warm-tables needs --warm-start"),
        ({"rerun": True}, "--rerun needs --resume"),
    ],
)
def test_what_cannot_be_is_refused_with_the_options(options: Keywords, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        JobOptions(CLICK_JOB, **options)


def test_an_address_that_is_taken_is_refused_before_the_model_is_built(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("raise AssertionError('the model file is run')\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput, match=f"cannot listen on {http} for HTTP"):
            run_job(JobOptions(file, http=http, run_dir=tmp_path / "runs"), Console(quiet=True))
        with pytest.raises(BadInput, match=f"cannot listen on {http} for HTTP"):
            run_worker(WorkerOptions(master="127.0.0.1:1", model=file, http=http))
    assert not (tmp_path / "runs").exists()
