"""The log of the command: as text and JSON, without logins, and each thing only so often."""

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from elastable.process import logs
from elastable.process.logs import describe_process, set_up_logging
from tests.elastable.processes import run_elastable

_LOG = logging.getLogger("elastable.tests")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What the process is, is forgotten."""
    logs._process.clear()
    yield
    logs._process.clear()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_text_has_time_level_logger_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    _LOG.info("so many: %d", 3)
    _LOG.debug("nobody asked")
    (line,) = lines(capsys)
    assert line.endswith(" INFO elastable.tests: so many: 3")


def test_json_says_what_the_process_is(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("debug", "json")
    describe_process(role="master", job="j")
    describe_process(version=7)
    _LOG.warning("hello %s", "you")
    said = json.loads(lines(capsys)[0])
    logged_at = datetime.fromisoformat(said.pop("time"))
    assert abs((datetime.now(UTC) - logged_at).total_seconds()) < 60
    process = {"role": "master", "job": "j", "version": 7}
    assert said == {"level": "WARNING", "logger": "elastable.tests", "message": "hello you", **process}


@pytest.mark.parametrize("form", logs.FORMATS)
def test_a_login_is_left_out(capsys: pytest.CaptureFixture[str], form: str) -> None:
    set_up_logging("info", form)
    _LOG.warning("the store %s failed", "redis://user:s3cret@host:1/0")
    _LOG.warning("the store rediss://:s3cret@host:1 failed; mail a@b")
    first, second = lines(capsys)
    assert "s3cret" not in first + second
    assert "redis://***@host:1/0" in first
    assert "a@b" in second


def test_repeats_are_written_five_times(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(logs, "_now", lambda: now)
    set_up_logging("info", "text")
    for number in range(20):
        _LOG.warning("again %d", number)
    _LOG.warning("something else")
    said = lines(capsys)
    assert [line.rpartition(": ")[2] for line in said] == [*(f"again {n}" for n in range(5)), "something else"]
    now += 61.0
    _LOG.warning("again %d", 20)
    assert lines(capsys)[0].endswith("again 20 (15 more like it are not in this log)")


def test_kinds_of_lines_are_bounded() -> None:
    rarely = logs._Rarely()
    for number in range(5_000):
        assert rarely.filter(logging.makeLogRecord({"name": "elastable.x", "msg": f"kind {number}"}))
    assert len(rarely._kinds) <= logs._MOST_KINDS


def test_the_audit_log_is_written_whatever_the_level_is(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("error", "text")
    for _ in range(10):
        logging.getLogger("elastable.audit").info("DropTable by administrator")
    assert len(lines(capsys)) == 10


def test_setting_it_up_twice_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "text")
    set_up_logging("info", "text")
    _LOG.info("once")
    assert len(lines(capsys)) == 1


@pytest.mark.process
def test_the_command_takes_level_and_format(tmp_path: Path) -> None:
    ran = run_elastable("--log-level", "loud", "status", "--master", "127.0.0.1:1")
    assert (ran.code, "'loud' is none of debug, info, warning, error" in ran.err) == (2, True)
    worker = ("worker", Path(__file__), "--master", "127.0.0.1:1", "--deadline", "0.1")
    ran = run_elastable("--log-format", "json", *worker)
    said = [json.loads(line) for line in ran.err.splitlines()]
    assert (ran.code, said[-1]["level"], said[-1]["message"].partition(":")[0]) == (5, "ERROR", "Unavailable")
