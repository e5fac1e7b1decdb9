"""Store servers that `elastable train` starts belong to its run: other users of the host reach the port and no more."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from elastable.embedding_store.errors import PermissionDenied, Unauthenticated
from elastable.embedding_store.wire.access.credentials import (
    GIVEN_ADMINISTRATOR_TOKEN,
    GIVEN_TOKEN,
    STORES_TOKEN,
    Credentials,
)
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.jobs.engines.roles import StoreAccess
from elastable.jobs.master_process import JobAccess
from elastable.jobs.options import TrainOptions
from tests.certificates import TOKEN
from tests.elastable.conftest import JOB
from tests.elastable.processes import CLICK_JOB, Hold, command_of, elastable, environment_of

CHANGES: list[Callable[[ShardClient], object]] = [
    lambda client: client.begin_job("another", False, bytes(32)),
    lambda client: client.recover(0),
    lambda client: client.version(),
]


@pytest.mark.timeout(900)
def test_only_the_processes_of_a_run_reach_its_store_servers(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold", 10)
    words = ("train", CLICK_JOB, "--workers", "2", "--stores", "2", *JOB, "--run-dir", tmp_path / "runs", "--no-export")
    limits = ("--client-calls", "99", "--client-bytes", "1GiB", "--client-rate", "5000")
    (readers := tmp_path / "readers").write_text("of-readers")
    readers.chmod(0o600)
    variables = {**hold.environment, "ELASTABLE_READER_TOKEN_FILE": str(readers)}
    with elastable(tmp_path, *words, *limits, env=variables) as job:
        hold.wait(job)
        run = (tmp_path / "runs" / "latest").resolve()
        logs = [(run / f"store-{number}.log").read_text() for number in range(2)]
        addresses = [re.findall(r"store server at (\S+),", log)[0] for log in logs]
        for address in addresses:
            for given in (Credentials(), Credentials(token="a-guess")):
                with ShardClient(address, 60.0, given) as stranger:
                    for change in CHANGES:
                        with pytest.raises(Unauthenticated):
                            change(stranger)
        processes = {pid: (command_of(pid), environment_of(pid)) for pid in job.children()}
        servers = [said for command, said in processes.values() if "store" in command.split("\0")]
        worker, _ = [said for command, said in processes.values() if "worker" in command.split("\0")]
        assert len(servers) == 2
        assert sum("\0".join(limits) in command for command, _ in processes.values()) == 2
        secrets = {servers[0][GIVEN_ADMINISTRATOR_TOKEN], servers[0][GIVEN_TOKEN]}
        assert worker[STORES_TOKEN] == servers[0][GIVEN_TOKEN]
        assert servers[0][GIVEN_ADMINISTRATOR_TOKEN] not in worker.values()
        # The token of workers reads and pushes, and claims nothing.
        with ShardClient(addresses[0], 60.0, Credentials(worker_token=worker[STORES_TOKEN])) as neighbour:
            assert neighbour.version() == 10
            with pytest.raises(PermissionDenied):
                neighbour.begin_job("another", False, bytes(32))
        # That of readers, which somebody set for predictions that follow, reads.
        with ShardClient(addresses[1], 60.0, Credentials(reader_token="of-readers")) as onlooker:
            assert onlooker.version() == 10
            with pytest.raises(PermissionDenied):
                onlooker.recover(0)
        commands = [command_of(job.pid), *(command for command, _ in processes.values())]
        hold.go()
        assert job.wait() == 0, job.err
        said = [job.out, job.err, *commands]
    result = json.loads((run / "result.json").read_text())
    assert result["store"] == "servers:" + ",".join(addresses)
    assert result["store_servers"] == [{"address": address, "store": "memory"} for address in addresses]
    assert not [secret for secret in secrets if any(secret in text for text in said)]
    files = [file for file in run.rglob("*") if file.is_file()]
    assert not [file for file in files for secret in secrets if secret.encode() in file.read_bytes()]


def test_tokens_of_a_run_are_its_own_whatever_is_configured() -> None:
    given = Credentials(token=TOKEN, reader_token="of-readers")
    first, second = StoreAccess.for_run(given), StoreAccess.for_run(given)
    assert len({TOKEN, *first.servers.values(), *second.servers.values()}) == 1 + 1 + 2 + 2  # and ""
    server = Credentials.from_environment({"ELASTABLE_TOKEN_FILE": "/set/elsewhere", **first.servers})
    assert server.sent_token == first.credentials.sent_token
    worker = Credentials.for_store_servers(first.workers)
    assert server.tokens[str(worker.sent_token)].word == "worker"
    assert not [secret for secret in server.tokens if secret in repr(first)]


def test_workers_of_local_store_servers_do_without_the_administrators_token() -> None:
    access = JobAccess.of(TrainOptions(CLICK_JOB, stores=("2",), listen="127.0.0.1:0"), Credentials(token=TOKEN))
    assert access.environment["ELASTABLE_TOKEN_FILE"] == ""
    assert access.credentials.worker_token == access.environment[GIVEN_TOKEN]
