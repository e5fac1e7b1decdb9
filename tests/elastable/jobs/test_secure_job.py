"""A job over mutual TLS with a token: the numbers of one in plain text, and nobody else gets in."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.wire.access.credentials import ENVIRONMENT, GIVEN_TOKEN
from elastable.process.exit_codes import ExitCode, exit_code_of
from tests.certificates import TOKEN, Authority
from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB, Finished, Hold, command_of, elastable, environment_of, run_elastable

HELD_AT = 10
SHARED = ("are read from its memory", "gradients are laid down in memory")


@dataclass(frozen=True)
class Met:
    """What came of a job, and of those who asked its held master."""

    code: int
    run: Path
    said: str
    workers: str
    asked: dict[str, Finished]
    worker_environment: dict[str, str]
    worker_command: str


def asking(environment: dict[str, str], *arguments: str) -> Finished:
    """What a command ends with in this process, where TensorFlow is loaded already."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ran = CliRunner().invoke(app, arguments)
    error = ran.exception
    return Finished(exit_code_of(error) if isinstance(error, ElastableError) else ran.exit_code, ran.stdout, str(error))


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Met:
    home = tmp_path_factory.mktemp("secure")
    authority, others = Authority(home / "tls"), Authority(home / "other")
    token, wrong = home / "token", home / "wrong"
    token.write_text(f"{TOKEN}\n")
    wrong.write_text("another\n")
    files = (authority.ca, *authority.issue("all", "127.0.0.1"), token)
    secure = dict(zip(ENVIRONMENT, map(str, files), strict=False))
    hold = Hold(home / "hold", HELD_AT)
    # No certificate names 0.0.0.0: workers here call another address.
    where = ("--listen", "0.0.0.0:0", "--transport", "grpc", "--run-dir", home / "runs", "--no-export")
    train = ("train", CLICK_JOB, "--workers", "2", *JOB, *where)
    with elastable(home, *train, env={**secure, **hold.environment}) as job:
        hold.wait(job)
        master = ("--master", job.address("0.0.0.0").replace("0.0.0.0", "127.0.0.1"), "--deadline")
        status = ("status", "--json", *master)
        worker, _ = job.children()
        environment, command = environment_of(worker), command_of(worker)
        asked = {
            "status": asking(secure, *status, "60"),
            "row": asking(secure, "lookup", "users", "3", *master, "60"),
            "plain": asking({}, *status, "1"),
            "wrong_token": asking({**secure, "ELASTABLE_TOKEN_FILE": str(wrong)}, *status, "60"),
            "stranger": asking({**secure, "ELASTABLE_TLS_CA": str(others.ca)}, *status, "60"),
            "unsent": run_elastable("worker", CLICK_JOB, *master, "60", env={**secure, "ELASTABLE_TOKEN_FILE": ""}),
        }
        hold.go()
        code, run = job.wait(), (home / "runs" / "latest").resolve()
        return Met(
            code,
            run,
            job.out + job.err,
            "".join(log.read_text() for log in run.glob("worker-*.log")),
            asked,
            environment,
            command,
        )


@pytest.mark.timeout(900)
def test_the_numbers_are_those_of_a_job_in_plain_text(met: Met, trained: Trained) -> None:
    assert met.code == 0, met.said
    trained.require_same_numbers(met.run / "checkpoints")
    # Rows and gradients of that one came through the master's memory, and here over gRPC.
    for log in (trained.run / f"worker-{number}.log" for number in range(2)):
        assert all(said in log.read_text() for said in SHARED)
    assert not any(said in met.workers for said in SHARED)


def test_those_of_the_job_are_answered(met: Met) -> None:
    assert (met.asked["status"].code, met.asked["row"].code) == (0, 0), met.asked
    assert json.loads(met.asked["status"].out)["version"] == HELD_AT


def test_others_are_not(met: Met) -> None:
    for who, code, why in (
        ("plain", ExitCode.UNAVAILABLE, "perhaps it speaks TLS and this client does not"),
        ("wrong_token", ExitCode.UNAUTHENTICATED, "its token is not this server's"),
        ("unsent", ExitCode.UNAUTHENTICATED, "it shows no token"),
        ("stranger", ExitCode.UNAUTHENTICATED, "its certificate is not of the authority"),
    ):
        refused = met.asked[who]
        assert (refused.code, refused.out) == (code, ""), refused.err
        assert why in refused.err


def test_local_workers_have_a_token_of_their_own(met: Met) -> None:
    assert met.worker_environment["ELASTABLE_TOKEN_FILE"] == ""
    own = met.worker_environment[GIVEN_TOKEN]
    assert own != TOKEN
    assert len(own) >= 32
    assert own not in met.worker_command + met.said + met.workers
    assert not [file for file in met.run.rglob("*") if file.is_file() and own.encode() in file.read_bytes()]


def test_the_token_is_shown_nowhere(met: Met) -> None:
    asked = [ran.out + ran.err for ran in met.asked.values()]
    assert not any(TOKEN in text for text in (met.said, met.workers, *asked))
    assert not [file for file in met.run.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


def test_a_job_that_cannot_be_secured_does_not_begin(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("all", "127.0.0.1")
    ran = run_elastable(
        *("train", CLICK_JOB, "--workers", "1", "--run-dir", tmp_path / "runs"),
        env={"ELASTABLE_TLS_CERT": str(certificate), "ELASTABLE_TLS_KEY": str(key)},
    )
    assert ran.code == ExitCode.BAD_INPUT
    assert "ELASTABLE_TLS_CA) is not set: a client cannot verify the server" in ran.err
    assert not list((tmp_path / "runs").glob("*"))
