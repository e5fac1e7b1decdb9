"""What `elastable status` and `elastable lookup` show, and what they refuse."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from elastable.command import app
from elastable.commands.lookup import _integers
from elastable.commands.status import _progress_table, _reports, _shown
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, TableNotFound, Unavailable
from elastable.embedding_store.open_store import open_store
from elastable.master.api import GoneWorker, JobStatus, WorkerIdentity, WorkerStatus


def test_markup_in_names_is_text() -> None:
    status = JobStatus(
        job="[blink]j[/blink]", state="[red]waiting", mode="sync", version=1, versions_total=2, epoch=0, epochs=1,
        records_trained=0, metrics={"[bold]auc": 0.5}, workers=(), store="redis://[::1]:7",
    )  # fmt: skip
    out = StringIO()
    Console(file=out, width=120).print(_progress_table(status))
    for text in ("job [blink]j[/blink]", "[red]waiting", "[bold]auc", "redis://[::1]:7"):
        assert text in out.getvalue()


def test_ids_of_the_command_line_are_never_floats() -> None:
    ids = [2**53 + 1, -(2**63), 2**63 - 1]
    assert _integers("t", [str(one) for one in ids]).tolist() == ids
    for text in (str(2**63), "9" * 5_000, "1e3", "1.0"):
        with pytest.raises(BadInput, match="is no id of table 't'"):
            _integers("t", [text])


def test_a_wrong_table_is_named_with_those_there_are(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/rows"
    with open_store(url) as store:
        store.create_table(TableSpec("items", 2))
    ended = CliRunner().invoke(app, ["lookup", "users", "anna", "--store", url])
    assert isinstance(ended.exception, TableNotFound)
    assert str(ended.exception) == "no table 'users'; tables here: 'items'"


class ScriptedStatus:
    """A master that says one status after the other, and is gone then."""

    def __init__(self, *statuses: JobStatus) -> None:
        self._statuses = list(statuses)

    def status(self) -> JobStatus:
        if not self._statuses:
            raise Unavailable("nobody answers")
        return self._statuses.pop(0)

    def pins(self) -> tuple[()]:
        return ()


def at(version: int, state: str = "training") -> JobStatus:
    worker, gone = WorkerIdentity("a", "here", 11), WorkerIdentity("b", "there", 22)
    return JobStatus(
        job="j", state=state, mode="sync", version=version, versions_total=10, epoch=0, epochs=1,
        records_trained=100 * version, metrics={}, workers=(WorkerStatus(worker, 2, 7, 50.0, 3.0),), store="memory",
        records_total=1_000, records_per_s=4.0, gone=(GoneWorker(gone, 1, 5, 60.0),),
    )  # fmt: skip


def test_it_says_how_fast_it_is_how_long_it_takes_and_who_is_gone() -> None:
    out = StringIO()
    Console(file=out, width=120).print(_shown(at(1), ()))
    for text in ("100 of 1,000", "examples/s", "0:03:45", "working", "50", "3 s ago", "gone", "left 60 s ago"):
        assert text in out.getvalue()
    assert at(1).seconds_left == 225.0
    assert at(1, "finished").seconds_left is None


def test_a_job_that_was_stopped_does_not_look_like_one_that_trained_all() -> None:
    out = StringIO()
    Console(file=out, width=120).print(_shown(replace(at(3, "finished"), stopped="interrupted"), ()))
    assert "finished (interrupted)" in out.getvalue()


def test_it_is_watched_until_the_job_ends() -> None:
    scripted = ScriptedStatus(at(1), at(2), at(3, "finished"), at(4))
    assert [reported.version for reported, _ in _reports(scripted, scripted, 1e-3)] == [1, 2, 3]  # type: ignore[arg-type]


def test_a_master_that_has_done_all_may_be_gone_and_another_may_not() -> None:
    scripted = ScriptedStatus(at(9), at(10, "evaluating"))
    assert [reported.version for reported, _ in _reports(scripted, scripted, 1e-3)] == [9, 10]  # type: ignore[arg-type]
    scripted = ScriptedStatus(at(9))
    with pytest.raises(Unavailable):
        list(_reports(scripted, scripted, 1e-3))  # type: ignore[arg-type]
