"""An entry is whole or not there, at whatever byte the process that appends it was killed, or stopped for a while."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.tiers.redis import stream_records
from elastable.embedding_store.tiers.redis.connection import Connection, without_sent
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from tests.embedding_store.dying_writer import started
from tests.embedding_store.log.log_places import KINDS, open_log, read
from tests.waiting import until_stopped

pytestmark = pytest.mark.process

_PATIENCE_S = 120.0


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_byte(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    address = str(tmp_path / "log") if kind == "files" else request.getfixturevalue(kind)
    with started("log.test_cut_appenders", address, "killed") as process:
        output, complaints = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, complaints
    ended = [json.loads(line) for line in output.splitlines()]
    assert len(ended) > 30
    assert {found for room, total, found in ended if room < total // 2} == {1}
    assert ended[-1][2] == 2 or kind != "files", "a file has what was written to it"


def test_stopped_in_the_middle_and_superseded(redis_cluster_url: str) -> None:
    url = redis_cluster_url
    with started("log.test_cut_appenders", url, "stopped") as old:
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


def test_stopped_between_two_entries_and_superseded(redis_url: str) -> None:
    url = redis_url
    with started("log.test_cut_appenders", url, "stopped") as old:
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


PART = 500  # bytes of a part, so that a small entry has several
FIRST = b"first"
SECOND = bytes(range(250)) * 5  # three parts


def main(address: str, how: str) -> None:
    """Prints what came of it, a line of JSON for each time."""
    with mock.patch.object(stream_records, "PART_BYTES", PART):
        if how == "stopped":
            _stopped(address)
        else:
            _killed(address)


def _killed(address: str) -> None:
    """Kills an appending process after each number of bytes; prints that number and how many entries are whole."""
    with open_log(address) as log:
        log.append(1, 1, [FIRST])
        with after_bytes(None) as sent:
            log.append(2, 2, [SECOND])
        log.truncate(1)
        total = sent()
    for room in [*range(0, total, 61), *range(total - 48, total + 1, 3)]:
        child = os.fork()
        if not child:
            with open_log(address) as log, after_bytes(room, signal.SIGKILL):
                log.truncate(1)
                log.append(2, 2, [SECOND])
                os.kill(os.getpid(), signal.SIGKILL)  # acknowledged
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        with open_log(address) as log:
            _keep_others_out(log)
            whole = [(1, 1, FIRST), (2, 2, SECOND)]
            found = read(log)
            assert found in (whole[:1], whole), f"after {room} bytes: {found}"
            print(json.dumps([room, total, len(found)]), flush=True)


def _keep_others_out(log: Log) -> None:
    """Nothing that the dead process sent is executed any more."""
    if isinstance(log, RedisLog):
        log.truncate(log.last)
        log.sync()
        log.refresh()


def _stopped(address: str) -> None:
    """Stops in the middle of an entry, then after one, then never; says each time how that ended."""
    with open_log(address) as log:
        log.append(1, 1, [FIRST])
        for attempt, room in enumerate((1_000, None, None)):
            try:
                with after_bytes(room, signal.SIGSTOP):
                    log.append(log.last + 1, 2, [SECOND])
                print(json.dumps(["done", log.last]), flush=True)
            except ElastableError as error:
                print(json.dumps([type(error).__name__, str(error)]), flush=True)
            if (attempt, log.last) == (1, 3):
                os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def after_bytes(room: int | None, then: int = 0) -> Iterator[Callable[[], int]]:
    """This process gets the signal `then` once so many bytes of appended entries have left it; None: never.

    Yields:
        How many bytes have left it.
    """
    gone, send, write = 0, Connection.send, os.pwritev

    def limited(pieces: Sequence[memoryview]) -> list[memoryview]:
        nonlocal gone
        allowed = list[memoryview]()
        for piece in pieces:
            left = len(piece) if room is None else max(0, room - gone)
            allowed.append(memoryview(piece)[:left])
            gone += len(allowed[-1])
        return allowed

    def end() -> None:
        nonlocal room
        if room is not None and gone >= room:
            room = None
            os.kill(os.getpid(), then)

    def sending(connection: Connection, pieces: list[memoryview]) -> int:
        if len(pieces) == 1:
            return send(connection, pieces)  # of no entry
        allowed, length = limited(pieces), 0
        while length < sum(map(len, allowed)):
            length += send(connection, without_sent(allowed, length))
        end()
        return length

    def writing(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        length = write(fd, limited([memoryview(piece) for piece in pieces]), offset)
        end()
        return length

    with mock.patch.object(Connection, "send", sending), mock.patch.object(os, "pwritev", writing):
        yield lambda: gone


if __name__ == "__main__":
    main(*sys.argv[1:])
