"""Where a job's master listens, with which credentials, and which ones the workers that it starts get."""

import socket
from pathlib import Path

import pytest
from rich.console import Console

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.access.credentials import GIVEN_TOKEN, Credentials, Role
from elastable.jobs.master_process import JobAccess, run_job
from elastable.jobs.options import JobOptions, TrainOptions, WorkerOptions
from elastable.jobs.worker_process import run_worker
from tests.certificates import TOKEN, Authority
from tests.elastable.processes import CLICK_JOB


def options(
    workers: int, listen: str = "127.0.0.1:0", stores: tuple[str, ...] = (), insecure: bool = False
) -> JobOptions:
    if workers:
        return TrainOptions(CLICK_JOB, workers=str(workers), listen=listen, stores=stores, insecure=insecure)
    return JobOptions(CLICK_JOB, listen=listen, stores=stores, insecure=insecure)


def test_local_workers_have_a_token_that_nobody_else_has() -> None:
    first, second = (JobAccess.of(options(2), Credentials()) for _ in range(2))
    assert first.anonymous is Role.READER
    (token,) = first.credentials.tokens
    assert first.credentials.tokens[token] is Role.WORKER
    assert first.environment[GIVEN_TOKEN] == token
    assert token not in second.credentials.tokens
    assert token not in repr(first.credentials)


def test_the_administrators_and_readers_tokens_are_not_for_workers() -> None:
    given = Credentials(token=TOKEN, reader_token="of-readers")
    access = JobAccess.of(options(1), given)
    assert access.anonymous is None
    assert set(access.credentials.tokens.values()) == set(Role)
    assert access.credentials.tokens[access.environment[GIVEN_TOKEN]] is Role.WORKER
    assert access.environment["ELASTABLE_TOKEN_FILE"] == access.environment["ELASTABLE_READER_TOKEN_FILE"] == ""


def test_a_workers_token_that_was_set_is_theirs() -> None:
    given = Credentials(token=TOKEN, worker_token="of-workers")
    access = JobAccess.of(options(1, stores=("127.0.0.1:1",)), given)
    assert access.credentials == given
    assert access.environment == {"ELASTABLE_TOKEN_FILE": "", "ELASTABLE_READER_TOKEN_FILE": ""}


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_that_look_rows_up_elsewhere_show_what_that_server_knows(workers: int) -> None:
    access = JobAccess.of(options(workers, stores=("127.0.0.1:1",)), Credentials(token=TOKEN))
    assert (access.credentials, access.environment) == (Credentials(token=TOKEN), {})


def test_a_master_that_waits_for_workers_takes_any_where_no_token_is_set() -> None:
    access = JobAccess.of(options(0), Credentials())
    assert (access.credentials, access.anonymous, access.environment) == (Credentials(), None, {})


def test_a_port_that_was_opened_on_purpose_is_open() -> None:
    access = JobAccess.of(options(1, "0.0.0.0:0", insecure=True), Credentials())
    assert (access.credentials, access.anonymous, access.environment) == (Credentials(), None, {})
    with pytest.raises(BadInput, match="--insecure"):
        JobAccess.of(options(1, "0.0.0.0:0"), Credentials())


def test_over_tls_workers_have_a_token_of_their_own_where_there_are_tokens(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    access = JobAccess.of(options(1, "0.0.0.0:0"), authority.mutual())
    assert access.credentials.tokens[access.environment[GIVEN_TOKEN]] is Role.WORKER
    without = JobAccess.of(options(1, "0.0.0.0:0"), authority.mutual(token=None))
    assert (without.environment, without.anonymous) == ({}, None)


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
