"""Jobs on a stream of events: what dies on the way, each event is trained once, and the bits are the same."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store.open_store import open_store
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.rpc.client import MasterClient
from elastable.process.exit_codes import ExitCode
from tests.elastable.jobs import event_job
from tests.elastable.kept_jobs import assert_same
from tests.elastable.processes import Hold, Running, elastable, succeeded, wait_until
from tests.ports import free_port
from tests.servers import Server, running_server

pytestmark = pytest.mark.process

JOB = Path(event_job.__file__)
EVENTS = 1_000
SIZES = ("--micro-batch-size", "16", "--grads-to-wait", "2", "--seed", "3", "--no-export", "--deadline", "60")


@pytest.fixture(scope="module")
def streams(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with events of all numbers below `EVENTS`, one of which cannot be read."""
    with running_server(server_binary, tmp_path_factory.mktemp("streams")) as server, server.client() as client:
        event_job.send(client, range(600))
        client.xadd("clicks", {"event": "{"})
        event_job.send(client, range(600, EVENTS))
        yield server


def environment(server: Server, **more: str) -> dict[str, str]:
    return {"EVENTS": server.url, **more}


@pytest.fixture(scope="module")
def undisturbed(streams: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with one worker: its run directory."""
    home = tmp_path_factory.mktemp("undisturbed")
    words = ("--workers", "1", "--until", "end", *SIZES, "--run-dir", home)
    succeeded("train", JOB, *words, env=environment(streams))
    return (home / "latest").resolve()


def checkpoint_of(run: Path) -> Checkpoint:
    return open_checkpoint(json.loads((run / "result.json").read_text())["checkpoint"])


def test_every_event_is_trained_and_the_bad_one_is_noted(undisturbed: Path) -> None:
    result = json.loads((undisturbed / "result.json").read_text())
    assert (result["examples"], result["version"]) == (EVENTS, -(-(EVENTS + 1) // 32))
    (line,) = (undisturbed / "bad-events.jsonl").read_text().splitlines()
    bad = json.loads(line)
    assert bad["partition"] == "clicks"
    assert "JSONDecodeError" in bad["reason"]


def test_a_killed_worker_and_a_killed_master_change_no_bit(
    streams: Server, undisturbed: Path, redis_url: str, tmp_path: Path
) -> None:
    """The other worker goes on with the master that takes over."""
    hold, port = Hold(tmp_path / "hold", 12), free_port()
    words = ("--until", "end", *SIZES, "--store", redis_url, "--listen", f"127.0.0.1:{port}", "--resume")
    master = ("master", JOB, *words, "--run-dir", tmp_path / "runs")
    with ExitStack() as held:
        first = held.enter_context(elastable(tmp_path, *master, env=environment(streams, **hold.environment)))
        first.address()
        work = ("worker", JOB, "--master", f"127.0.0.1:{port}")
        one, other = (
            held.enter_context(elastable(tmp_path, *work, env=environment(streams), name=name))
            for name in ("one", "other")
        )
        hold.wait(first)
        first.kill()
        one.kill()
        second = held.enter_context(elastable(tmp_path, *master, env=environment(streams), name="second"))
        assert second.wait() == 0, second.err
        assert other.wait() == 0, other.err
        assert "resuming at version 1" in second.out
    run = (tmp_path / "runs" / "latest").resolve()
    assert_same(checkpoint_of(run), checkpoint_of(undisturbed))


def trained_once(store: str, numbers: range) -> bool:
    with open_store(store) as rows:
        found = rows.lookup({"trained": np.array(numbers)})["trained"][:, 0]
    return bool((found == 1.0).all())


def test_what_comes_too_slowly_is_trained_after_the_linger_and_sigterm_ends_the_job(
    redis_url: str, tmp_path: Path
) -> None:
    """Also in a stream that comes while the job runs; the job that resumes it trains what comes then."""
    store = f"{redis_url}?namespace=rows"
    slow = ("--linger", "0.2", "--average", "sum", "--run-dir", tmp_path / "runs")
    words = ("train", JOB, "--workers", "2", *SIZES, "--store", store, "--resume", *slow)
    counting = {"EVENTS": redis_url, "COUNT": "1"}

    def trained(job: Running) -> int:
        with MasterClient(job.address(), 60) as master:
            return master.status().records_trained

    def is_behind(job: Running) -> tuple[int, int, str]:
        with MasterClient(job.address(), 60) as master:
            stream = master.status().stream
        assert stream is not None
        return stream.lag_events, stream.bad_events, stream.away

    with redis.Redis.from_url(redis_url) as client:
        client.xadd("clicks", {"event": json.dumps({"number": 0, "far": 1e6})})
        with elastable(tmp_path, *words, env=counting) as job:
            wait_until(lambda: trained(job) == 1, "the first event trained", job)
            client.xadd("more", {"event": json.dumps({"number": 1, "far": 1e6})})  # a partition that is new
            wait_until(lambda: trained(job) == 2, "the second event trained", job)
            wait_until(lambda: is_behind(job) == (0, 0, ""), "no event waits", job)  # it is asked for once a second
            job.signal(signal.SIGTERM)
            assert job.wait() == ExitCode.INTERRUPTED, job.err
        event_job.send(client, range(2, 100))
    succeeded(*words, "--until", "end", env=counting)
    assert trained_once(store, range(100))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_while_events_come_lose_none_and_train_none_twice(redis_url: str, tmp_path: Path, seed: int) -> None:
    """Of masters and workers; versions that were cut and not committed are cut in another way by the next master."""
    random, port, store = np.random.default_rng(seed), free_port(), f"{redis_url}?namespace=rows"
    counting = {"EVENTS": redis_url, "COUNT": "1"}
    words = ("--store", store, "--listen", f"127.0.0.1:{port}", "--resume", "--linger", "0.05", "--average", "sum")
    master = ("master", JOB, *SIZES, *words, "--run-dir", tmp_path / "runs")
    work = ("worker", JOB, "--master", f"127.0.0.1:{port}")
    started = 0

    def start(held: ExitStack, *command: str | Path) -> Running:
        nonlocal started
        started += 1
        return held.enter_context(elastable(tmp_path, *command, env=counting, name=f"process-{started}"))

    with ExitStack() as held, redis.Redis.from_url(redis_url) as client:
        event_job.send(client, range(20))
        running = {"master": start(held, *master), "one": start(held, *work), "other": start(held, *work)}
        for kill in range(1, 9):
            event_job.send(client, range(20 * kill, 20 * kill + 10))
            wait_until(lambda: has_row(store, 20 * kill), "an event trained", running["master"])  # noqa: B023
            event_job.send(client, range(20 * kill + 10, 20 * kill + 20))
            name = str(random.choice([*running]))
            running[name].kill()
            running[name] = start(held, *(master if name == "master" else work))
        running["master"].kill()
        last = start(held, *master, "--until", "end")
        assert last.wait() == 0, last.err
    assert trained_once(store, range(180))


def has_row(store: str, number: int) -> bool:
    with open_store(store) as rows:
        return "trained" in rows.specs() and bool(rows.lookup({"trained": np.array([number])})["trained"][0, 0])
