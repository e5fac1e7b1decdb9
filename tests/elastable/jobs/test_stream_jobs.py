"""Jobs on a stream of events: what dies on the way, each event is trained once, and the bits are the same."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
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
from tests.ports import free_address, free_port
from tests.servers import Server, running_server
from tests.worker.readers.streams.test_kafka_reader import running_broker

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


def test_a_cut_that_was_handed_out_and_not_committed_leaves_no_trace(
    undisturbed: Path, redis_url: str, tmp_path: Path
) -> None:
    """It came after the last version's record: the next master cuts what waits then, whatever a worker has prepared."""
    hold, address = Hold(tmp_path / "hold", 1), free_address()
    words = (*SIZES, "--store", f"{redis_url}?namespace=rows", "--listen", address, "--resume")
    master = ("master", JOB, *words, "--run-dir", tmp_path / "runs")
    # Of each stream the 16 that version 1 is made of in any case; and 19 more, a micro-batch of 16 and one of 3.
    whole = [number for number in range(48) if number % 3 == 0 or number < 24]
    short = [number for number in range(24, 69) if number not in whole and (number % 3 == 0 or number < 42)]
    events = {"EVENTS": redis_url}
    with ExitStack() as held, redis.Redis.from_url(redis_url) as client:
        event_job.send(client, whole)
        held_at = {**events, **hold.environment}
        first = held.enter_context(elastable(tmp_path, *master, "--linger", "0.2", env=held_at))
        first.address()
        work = ("worker", JOB, "--master", address)
        worker = held.enter_context(elastable(tmp_path, *work, env=events, name="worker"))
        hold.wait(first)
        event_job.send(client, short)
        with MasterClient(address, 60) as said:
            wait_until(lambda: [each.leases for each in said.status().workers] == [2], "the cut leased", worker)
        first.kill()
        event_job.send(client, (number for number in range(600) if number not in {*whole, *short}))
        client.xadd("clicks", {"event": "{"})
        event_job.send(client, range(600, EVENTS))
        second = held.enter_context(elastable(tmp_path, *master, "--until", "end", env=events, name="second"))
        assert second.wait() == 0, second.err
        assert worker.wait() == 0, worker.err
        assert "resuming at version 1" in second.out
    assert_same(checkpoint_of((tmp_path / "runs" / "latest").resolve()), checkpoint_of(undisturbed))


def test_store_servers_and_their_master_are_killed(streams: Server, undisturbed: Path, tmp_path: Path) -> None:
    hold, again = Hold(tmp_path / "hold", 12), Hold(tmp_path / "again", 15)
    port, places = free_port(), [free_address(), free_address()]
    words = ("--until", "end", *SIZES, "--stores", ",".join(places), "--listen", f"127.0.0.1:{port}", "--resume")
    master = ("master", JOB, *words, "--run-dir", tmp_path / "runs")
    with ExitStack() as held:

        def start(name: str, *command: str | Path, **more: str) -> Running:
            return held.enter_context(elastable(tmp_path, *command, env=environment(streams, **more), name=name))

        def serve(number: int, name: str) -> Running:
            rows = f"memory?log={tmp_path}/rows-{number}"
            server = start(name, "store", "--listen", places[number], "--store", rows)
            server.address()
            return server

        servers = [serve(number, f"store-{number}") for number in range(2)]
        first = start("first", *master, **hold.environment)
        first.address()
        workers = [start(name, "worker", JOB, "--master", f"127.0.0.1:{port}") for name in ("one", "other")]
        hold.wait(first)
        for running in (first, *servers):
            running.kill()
        for number in range(2):
            serve(number, f"store-{number}-again")
        second = start("second", *master, **again.environment)
        again.wait(second)  # else one worker may train all that is left before the other one is back
        with MasterClient(f"127.0.0.1:{port}", 60) as said:
            wait_until(lambda: len(said.status().workers) == 2, "both workers back", second)
        again.go()
        assert second.wait() == 0, second.err
        assert [worker.wait() for worker in workers] == [0, 0], [worker.err for worker in workers]
        assert re.search(r"resuming at version 1[12]", second.out), second.out
    assert_same(checkpoint_of((tmp_path / "runs" / "latest").resolve()), checkpoint_of(undisturbed))


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


def test_events_in_kafka_are_trained_once_by_masters_and_workers_that_are_killed(
    redis_url: str, tmp_path: Path
) -> None:
    store, address, numbers = f"{redis_url}?namespace=rows", free_address(), iter(range(200))
    words = ("--store", store, "--listen", address, "--resume", "--linger", "0.1", "--average", "sum")
    master, work = ("master", JOB, *SIZES, *words, "--run-dir", tmp_path / "runs"), ("worker", JOB, "--master", address)
    with running_broker() as broker, ExitStack() as held:

        def start(name: str, *command: str | Path) -> Running:
            counting = {"EVENTS": broker.servers, "COUNT": "1"}
            return held.enter_context(elastable(tmp_path, *command, env=counting, name=name))

        def send(count: int) -> int:
            """Sends so many events, to two partitions of each topic; the number of the last."""
            for number in islice(numbers, count):
                topic, event = event_job.event_of(number)
                broker.send(topic, event, partition=number % 2)
            return number

        last = send(40)
        running = [start("first", *master), start("one", *work), start("other", *work)]
        wait_until(lambda: has_row(store, last), "the last event trained", running[0])
        for place, name, command in ((1, "third", work), (0, "second", master)):
            last = send(40)
            running[place].kill()
            last = send(40)
            running[place] = start(name, *command)
            wait_until(lambda: has_row(store, last), "the last event trained", running[0])  # noqa: B023
        running[0].kill()
        ending = start("ending", *master, "--until", "end")
        assert ending.wait() == 0, ending.err
    assert trained_once(store, range(200))


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
