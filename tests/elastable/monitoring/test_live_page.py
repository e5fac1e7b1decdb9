"""The live page without a browser: its data, its structure, and that it loads nothing."""

import base64
import hashlib
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import ModelError
from elastable.embedding_store.measures import BOUNDS_S, Histogram
from elastable.embedding_store.shards.client_pushes import ClientPushes
from elastable.embedding_store.shards.server_contract import ServerStatus, ShardStatus
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.master.api import WorkerIdentity
from elastable.master.rpc.messages import status_from_message, status_to_message
from elastable.monitoring import endpoints as event_stream
from elastable.monitoring.endpoints import PAGE, Endpoints
from elastable.monitoring.http_server import HttpServer
from elastable.monitoring.page.views import JobView, ShardView, View, Watched, advice_on
from elastable.output.noted import CheckpointLog, Curves
from elastable.process.child import EndedChild
from tests.certificates import TOKEN
from tests.elastable.monitoring.http_client import LIMIT_S, get
from tests.elastable.monitoring.test_http_server import HERE
from tests.embedding_store.shards.served_shards import served
from tests.embedding_store.shards.test_store_servers import JOB, begin, push_all
from tests.master.fakes import Bench, FakeWorker, drive
from tests.untyped import Parsed

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"


@contextmanager
def shown(view: View, credentials: Credentials = Credentials()) -> Iterator[tuple[HttpServer, Endpoints]]:  # noqa: B008
    endpoints = Endpoints(Watched({}, dict, view))
    with closing(endpoints), HttpServer(HERE, endpoints.app, credentials) as server:
        yield server, endpoints
        endpoints.end()


def job_view(bench: Bench, log: CheckpointLog | None = None, problem: str | None = None) -> JobView:
    curves = Curves()
    curves.note("train", 1, {"loss": 0.5})
    return JobView(
        bench.master, bench.store, lambda: problem, log or CheckpointLog(), curves, "elastable train --resume"
    )


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


TAGS = Tags(PAGE)


def test_the_page_loads_nothing_from_anywhere() -> None:
    for tag, attributes in TAGS.found:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
        assert not [name for name in attributes if name.startswith("on")], tag
        assert "style" not in attributes, tag
    without_names = PAGE.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(|import\(|fetch\(|XMLHttpRequest|WebSocket", without_names)


def test_what_the_server_says_is_never_markup() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", PAGE)


def test_its_policy_lets_its_own_script_and_style_run_and_nothing_else() -> None:
    with shown(dict) as (server, _):
        answer = get(server.url)
    assert answer.text == PAGE
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy


def test_a_screen_reader_finds_its_way() -> None:
    assert TAGS.all("html") == [{"lang": "en"}]
    assert [tag for tag, _ in TAGS.found if tag in ("header", "main", "h1")] == ["header", "h1", "main"]
    ids = [attributes["id"] for _, attributes in TAGS.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for section in TAGS.all("section"):
        assert section["aria-labelledby"] in ids
    for tag, attributes in TAGS.found:
        if attributes.get("role") == "region":
            assert (tag, attributes["tabindex"], attributes["aria-labelledby"] in ids) == ("div", "0", True)
    (progress,) = TAGS.all("progress")
    assert progress["aria-label"]
    assert {attributes.get("role") for _, attributes in TAGS.found} >= {"status", "alert"}
    assert TAGS.all("a")[0]["href"] == "#content"


def test_it_fits_a_phone_and_both_themes() -> None:
    assert any(meta.get("content") == "width=device-width, initial-scale=1" for meta in TAGS.all("meta"))
    assert "prefers-color-scheme: dark" in PAGE
    assert set(re.findall(r"getElementById|at\(\"([\w-]+)\"\)", PAGE)) - {""} <= {
        str(attributes["id"]) for _, attributes in TAGS.found if "id" in attributes
    }


def state_of(view: View) -> Parsed:
    with shown(view) as (server, _):
        answer = get(f"{server.url}state")
    assert answer.headers["content-type"] == "application/json"
    found: Parsed = json.loads(answer.text)
    return found


def test_it_shows_a_job_from_its_beginning_to_its_end() -> None:
    bench = Bench()
    before = state_of(job_view(bench))
    assert (before["state"], before["version"], before["why"]) == ("waiting", 0, "the job has not begun")
    drive(bench, [FakeWorker(bench.master, bench.store) for _ in range(2)])
    after = state_of(job_view(bench))
    assert (after["state"], after["version"]) == ("finished", after["versions"])
    assert (after["records"], after["records_total"]) == (46, 46)
    assert after["curves"] == {"loss": [[1, 0.5]]}
    rows = ["rows", "rows: prepare", "rows: apply", "rows: append"]
    assert [phase["phase"] for phase in after["phases"]] == ["version", "wait", "sum", "dense", *rows, "callbacks"]
    assert all(phase["mean_s"] > 0 and phase["p95_s"] > 0 for phase in after["phases"])
    assert after["tables"][0]["name"] == "t"
    assert after["tables"][0]["rows"] == 10
    assert after["resume"] == "elastable train --resume"
    assert after["problems"] == []


def test_a_worker_that_dies_is_gone_and_one_that_comes_back_is_not() -> None:
    bench = Bench()
    view = job_view(bench)
    first = FakeWorker(bench.master, bench.store)
    assert [worker["state"] for worker in state_of(view)["workers"]] == ["idle"]
    first.session.close()
    (gone,) = [worker for worker in state_of(view)["workers"] if worker["state"] == "gone"]
    assert gone["id"] == first.identity.incarnation
    problems = [problem["what"] for problem in state_of(view)["problems"]]
    assert problems == ["It left or died: 0 micro-batches go to others."]
    bench.master.join(first.identity)
    assert [worker["state"] for worker in state_of(view)["workers"]] == ["idle"]


def test_a_worker_that_ended_before_it_joined_is_gone_and_one_that_joined_is_there_once(tmp_path: Path) -> None:
    bench = Bench()
    joined = FakeWorker(bench.master, bench.store)
    bench.master.join(WorkerIdentity("real", socket.gethostname(), 4711))
    ended = [EndedChild(4711, 1, tmp_path / "worker-0.log"), EndedChild(4712, -9, tmp_path / HOSTILE)]
    view = JobView(bench.master, bench.store, lambda: None, CheckpointLog(), Curves(), "", lambda: ended)
    state = state_of(view)
    assert [(it["id"], it["state"]) for it in state["workers"]] == [
        (joined.identity.incarnation, "idle"),
        ("real", "idle"),
        ("", "gone"),
    ]
    (problem,) = state["problems"]
    assert problem["who"] == f"worker {socket.gethostname()} pid 4712"
    assert "exit code -9" in problem["what"]
    assert "\x1b" not in problem["what"]


def test_refusals_and_failed_checkpoints_say_what_to_do() -> None:
    bench, log = Bench(), CheckpointLog()
    log.note_failure(7, 0.5, "No space left on device")
    worker = FakeWorker(bench.master, bench.store)
    bench.master.report_failure(worker.identity.incarnation, ModelError(HOSTILE), fatal=False)
    problems = state_of(job_view(bench, log))["problems"]
    refused, failed = (next(p for p in problems if p["who"].startswith(who)) for who in ("worker", "the checkpoint"))
    assert "\x1b" not in refused["what"]
    assert "<img src=x" in refused["what"]  # the page shows it as text
    assert "model file" in refused["advice"]
    assert "No space left" in failed["what"]
    assert "Make room" in failed["advice"]


def test_a_store_that_is_away_is_not_asked() -> None:
    state = state_of(job_view(Bench(), problem="Unavailable: nobody answers"))
    assert (state["store_ready"], state["tables"]) == (False, [])
    assert "network" in state["problems"][0]["advice"]


def test_a_metric_that_is_not_a_number_is_json_all_the_same() -> None:
    curves = Curves()
    curves.note("train", 1, {"loss": float("nan")})
    curves.note("train", 2, {"loss": 1.0})
    assert curves.points() == {"loss": [(2, 1.0)]}


def test_curves_are_bounded_and_keep_their_ends() -> None:
    curves = Curves()
    for version in range(1, 10_001):
        curves.note("train", version, {"loss": 1.0 / version})
    curves.note("epoch", 10_000, {"loss": 5.0, "val_loss": 7.0})
    points = curves.points()
    assert len(points["loss"]) <= 256
    assert points["loss"][0] == (1, 1.0)
    assert points["loss"][-1][0] > 9_900
    assert points["val_loss"] == [(10_000, 7.0)]


def test_a_parameter_server_shows_its_tables() -> None:
    with MemoryStore() as store:
        shard = Shard(store, clients=ClientPushes(store))
        state = state_of(ShardView(shard, "memory", lambda: None))
        away = state_of(ShardView(shard, "memory", lambda: "Unavailable: gone"))
    assert (state["kind"], state["state"], state["tables"]) == ("server", "serving clients", [])
    assert (away["store_ready"], len(away["problems"])) == (False, 1)


def test_a_store_server_shows_its_shard_and_the_job_that_claimed_it() -> None:
    with served(1) as ((server,), store):
        view = ShardView(server.shard, "redis://me:secret@host:6379/0", lambda: None)
        before = state_of(view)
        begin(store)
        push_all(store, 0)
        after = state_of(view)
        away = state_of(ShardView(server.shard, "memory", lambda: "StoreFailed: disk full"))
    assert (before["kind"], before["state"], before["tables"]) == ("shard", "waiting for a job", [])
    assert "secret" not in str(before)
    assert (after["state"], after["job"], after["version"]) == ("serving a job", JOB, 0)
    assert after["pushed_bytes"] > 0
    assert {table["name"] for table in after["tables"]} == {"fixed", "any"}
    assert (away["state"], away["problems"][0]["what"]) == ("failed", "StoreFailed: disk full")


def test_a_job_shows_its_store_servers_and_which_one_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    fast, slow = ({"append": Histogram((4, *[0] * len(BOUNDS_S)), seconds)} for seconds in (0.4, 1.2))
    here = ServerStatus("10.0.0.1:50051", ShardStatus(3, 7, 70, 10, 4, commits=fast))
    waited = ServerStatus("10.0.0.2:50051", ShardStatus(2, 5, 50, commits=slow), waited_s=4.0)
    away = ServerStatus("10.0.0.3:50051", None, failure="ShardAway: " + HOSTILE)
    monkeypatch.setattr(bench.master, "_servers", lambda: (here, waited, away))
    state = state_of(job_view(bench))
    assert [server["state"] for server in state["servers"]] == ["serving", "waited for", "away"]
    assert state["servers"][0]["hit_rate"] == pytest.approx(0.6)
    (append,) = [phase for phase in state["phases"] if phase["phase"] == "rows: append"]
    assert append["mean_s"] == pytest.approx(0.2)
    (problem,) = state["problems"]
    assert "10.0.0.3:50051" in problem["who"]
    assert "\x1b" not in problem["what"]
    assert status_from_message(status_to_message(bench.master.status())).servers == (
        here,
        waited,
        replace(away, failure=printable(away.failure, 1024)),
    )


def test_every_error_of_a_worker_has_an_advice_or_says_enough() -> None:
    assert "model file" in advice_on("ModelError")
    assert advice_on("ZeroDivisionError") == "Look at the worker's log."
    assert advice_on("__all__") == "Look at the worker's log."


def events(
    server: HttpServer, headers: Mapping[str, str] | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=LIMIT_S)
    connection.request("GET", "/events", headers=dict(headers or {}))
    return connection, connection.getresponse()


def next_event(reply: http.client.HTTPResponse) -> Mapping[str, object] | None:
    """The data of the next event; None: the stream has ended."""
    while line := reply.readline():
        if line.startswith(b"data: "):
            found: Parsed = json.loads(line.removeprefix(b"data: "))
            return found
    return None


def test_events_come_until_the_process_ends_and_the_last_is_its_last_state() -> None:
    said = {"state": "training"}
    with shown(lambda: said) as (server, endpoints):
        connection, reply = events(server)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert next_event(reply) == {"state": "training"}
        said["state"] = "finished"
        endpoints.end()
        seen = [event["state"] for event in iter(lambda: next_event(reply), None) if event is not None]
        assert seen[-1] == "finished"
        connection.close()


def test_only_some_streams_are_served_and_one_that_ends_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MOST_STREAMS", 1)
    with shown(lambda: {"state": "training"}) as (server, endpoints):
        connection, reply = events(server)
        assert next_event(reply) is not None
        assert get(f"{server.url}events").status == 503
        reply.close()
        connection.close()
        while True:  # the server hears of it with its next event
            connection, reply = events(server)
            if reply.status == 200:
                break
            connection.close()
        endpoints.end()
        assert next_event(reply) is not None
        connection.close()


def test_it_shows_nothing_without_the_token() -> None:
    view = job_view(Bench())
    with shown(view, Credentials(reader_token=TOKEN)) as (server, _):
        for path in ("", "state", "events"):
            answer = get(f"{server.url}{path}")
            assert (answer.status, "waiting" in answer.text, "<main" in answer.text) == (401, False, False)
        assert get(f"{server.url}state", {"Authorization": f"Bearer {TOKEN}"}).status == 200


def test_what_a_checkpoint_was_is_in_the_view() -> None:
    log = CheckpointLog()
    log.note(4, 0.25, "s3://bucket/ckpt-4")
    (found,) = state_of(job_view(Bench(), log))["checkpoints"]
    assert found == {**asdict(log.noted()[0])}
    assert (found["version"], found["seconds"], found["bytes"]) == (4, 0.25, None)
