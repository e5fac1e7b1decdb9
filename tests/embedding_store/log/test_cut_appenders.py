"""An entry is whole or not there, at whatever byte the process that appends it was killed, or stopped for a while."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.embedding_store.log.cut_appender import FIRST, SECOND
from tests.embedding_store.log.log_places import KINDS, open_log, read
from tests.waiting import until_stopped

pytestmark = pytest.mark.process

_PATIENCE_S = 120.0
_ROOT = Path(__file__).parents[3]


@contextmanager
def appender(address: str, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `tests.embedding_store.log.cut_appender`."""
    command = [sys.executable, "-m", "tests.embedding_store.log.cut_appender", address, how]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_byte(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    address = str(tmp_path / "log") if kind == "files" else request.getfixturevalue(kind)
    with appender(address, "killed") as process:
        output, complaints = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, complaints
    ended = [json.loads(line) for line in output.splitlines()]
    assert len(ended) > 80
    assert {found for room, total, found in ended if room < total // 2} == {1}
    assert ended[-1][2] == 2 or kind != "files", "a file has what was written to it"


def test_stopped_in_the_middle_and_superseded(node_or_cluster_url: str) -> None:
    url = node_or_cluster_url
    with appender(url, "stopped") as old:
        until_stopped(old)
        with open_log(url) as log:
            assert read(log) == [(1, 1, FIRST)]
            log.append(2, 5, [b"of the successor"])
            old.send_signal(signal.SIGCONT)
            output, complaints = old.communicate(timeout=_PATIENCE_S)
            assert old.returncode == 0, complaints
            assert [json.loads(line)[0] for line in output.splitlines()] == ["TakenOver"] * 3
            log.append(3, 6, [SECOND])
            assert read(log) == [(1, 1, FIRST), (2, 5, b"of the successor"), (3, 6, SECOND)]


def test_stopped_between_two_entries_and_superseded(node_or_cluster_url: str) -> None:
    url = node_or_cluster_url
    with appender(url, "stopped") as old:
        until_stopped(old)
        old.send_signal(signal.SIGCONT)
        assert old.stdout is not None
        assert [json.loads(old.stdout.readline()) for _ in range(2)] == [["done", 2], ["done", 3]]
        until_stopped(old)
        with open_log(url) as log:
            log.append(4, 5, [b"of the successor"])
            old.send_signal(signal.SIGCONT)
            output, complaints = old.communicate(timeout=_PATIENCE_S)
            assert old.returncode == 0, complaints
            assert [json.loads(line)[0] for line in output.splitlines()] == ["TakenOver"]
            assert read(log) == [(1, 1, FIRST), (2, 2, SECOND), (3, 2, SECOND), (4, 5, b"of the successor")]
