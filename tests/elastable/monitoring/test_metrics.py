"""Metrics of real processes: every one of docs/reference.md is there, with values that are so."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import Metric as Family
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastable.embedding_store import RemoteStore, TableSpec
from elastable.embedding_store.errors import ElastableError, Unavailable
from elastable.embedding_store.measures import Counts, Durations
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.support.retry import retry
from elastable.master.api import AsyncPushId, Push, StreamStatus, WorkerIdentity
from elastable.master.rpc.client import MasterClient
from elastable.monitoring.endpoints import registry_of
from elastable.monitoring.metrics import (
    METRICS,
    Metric,
    MetricKind,
    Source,
    prediction_source,
    process_source,
    servers_source,
    shard_lookups_source,
    stream_source,
)
from tests.elastable.conftest import JOB
from tests.elastable.monitoring.http_client import get
from tests.elastable.monitoring.otlp_collector import ExportedSpan, collecting
from tests.elastable.processes import CLICK_JOB, Hold, Running, elastable, run_elastable, wait_until
from tests.embedding_store.shards.served_shards import served
from tests.embedding_store.shards.test_store_servers import begin, commit, push_all

pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[3] / "docs" / "operating.md"
HELD_AT = 9


def test_names_of_the_page_exist() -> None:
    for name in re.findall(r"elastable_[a-z_]*[a-z]\b(?!\*)", PAGE.read_text()):
        assert re.sub(r"_(bucket|sum|count)$", "", name) in METRICS or name in METRICS, name


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"elastable_[a-z]+(_[a-z]+)*", metric.name)
    assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
    for unit in ("seconds", "bytes"):
        if metric.unit == unit:
            assert unit in metric.name.removesuffix("_total").split("_")
    assert metric.meaning.endswith(".")


@dataclass
class Scrape:
    families: dict[str, Family] = field(default_factory=dict)

    def value(self, name: str, /, **labels: str) -> float:
        """One value; fails where there is none, or are several."""
        (found,) = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return float(found)

    @property
    def ours(self) -> set[str]:
        found = set()
        for family in self.families.values():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name.startswith("elastable_"):
                found.add(name)
        return found


def scrape(process: Running) -> Scrape:
    answer = get(f"{process.url()}metrics")
    assert answer.status == 200, answer.text
    return Scrape({family.name: family for family in text_string_to_metric_families(answer.text)})


@dataclass
class Watched:
    """What processes of one job showed while its master was held."""

    master: Scrape
    worker: Scrape
    ready: int
    code: int
    out: str
    log: list[dict[str, object]]
    spans: list[ExportedSpan]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A job with rows in files is held; one of its workers was killed, one is refused, one goes on."""
    home = tmp_path_factory.mktemp("watched")
    hold = Hold(home / "hold", HELD_AT)
    copied = home / "click_job.py"
    copied.write_text("# another\n" + CLICK_JOB.read_text())
    http = ("--http", "127.0.0.1:0")
    saved = ("--run-dir", home / "runs", "--checkpoint-every", "4", "--no-export", "--store", f"file://{home / 'rows'}")
    words = ("master", CLICK_JOB, *JOB, *saved, "--listen", "127.0.0.1:0", *http)
    with ExitStack() as processes:
        collector = processes.enter_context(collecting())
        patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "120"}
        traced = {**hold.environment, **patient, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        logged = ("--log-level", "info", "--log-format", "json")
        job = processes.enter_context(elastable(home, *logged, *words, env=traced, name="master"))
        worker = ("worker", CLICK_JOB, "--master", job.address(), "--deadline", "60", *http)
        first = processes.enter_context(elastable(home, "--traces", collector.url, *worker, env=patient, name="first"))
        other = processes.enter_context(elastable(home, *worker, name="other"))
        hold.wait(job)
        assert run_elastable("worker", copied, *worker[2:]).code != 0
        refused_push(job)
        wait_until(lambda: count(job, "elastable_checkpoints_total", result="written") == 2, "checkpoints", job)
        other.signal(signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL
        left = 3  # killed, refused, and the one that pushed what cannot be
        wait_until(lambda: count(job, "elastable_workers", state="gone") == left, "workers that are gone", job)
        shown = scrape(job), scrape(first), get(f"{job.url()}readyz").status
        hold.go()
        code = job.wait()
        first.wait()
        log = [json.loads(line) for line in job.err.splitlines()]
        yield Watched(*shown, code, job.out, log, collector.spans())


def count(process: Running, name: str, /, **labels: str) -> float:
    return scrape(process).value(name, **labels)


def refused_push(job: Running) -> None:
    """Pushes a gradient of the wrong shape, as a worker of the job."""
    client = MasterClient(job.address(), deadline_s=60.0)
    session = client.join(WorkerIdentity("liar"))
    push = Push(AsyncPushId("liar", 1), 3, slices={"users": Slices(np.array([3]), np.ones((1, 5), np.float32))})
    with pytest.raises(ElastableError):
        client.report_gradient(push)
    session.close()


def test_the_job_goes_on_to_its_end(watched: Watched) -> None:
    assert watched.code == 0, watched.out
    assert watched.ready == 200


def test_the_log_of_the_master_tells_what_becomes_of_its_job(watched: Watched) -> None:
    def entries(pattern: str) -> list[dict[str, object]]:
        return [line for line in watched.log if re.fullmatch(pattern, str(line["message"]))]

    assert {line["role"] for line in watched.log} == {"master"}
    begun = next(at for at, line in enumerate(watched.log) if re.match(r"job \w+ begins", str(line["message"])))
    assert len({line["job"] for line in watched.log[begun:]}) == 1
    assert len(entries(r"job \w+ begins at version 0")) == 1
    joined = {line["worker"] for line in entries(r"worker \w+( \(host .*, pid \d+\))? joined")}
    left = {line["worker"] for line in entries(r"worker .* left or died; \d+ of its micro-batches go to others")}
    # One is killed, one refused, one pushes what cannot be; the one that stays ends with the job.
    assert len(joined) == 4
    assert left == joined - {line["worker"] for line in entries(r"worker .* left: the job is over")}
    saved = [line["version"] for line in entries(r"checkpoint of version \d+ written in .*")]
    assert saved[:2] == [4, 8]
    assert len(entries(r"epoch [12] ended at version \d+: loss .*")) == 2
    assert len(entries(r"job \w+ ends at version 40: all is trained")) == 1


def test_processes_that_are_traced_share_the_traces_of_versions(watched: Watched) -> None:
    services: dict[str, list[ExportedSpan]] = {each.service: [] for each in watched.spans}
    for each in watched.spans:
        services[each.service].append(each)
    assert set(services) == {"elastable-master", "elastable-worker"}
    versions = {each.id: each.trace for each in services["elastable-master"] if each.name == "version"}
    micro_batches = [each for each in services["elastable-worker"] if each.name == "micro-batch"]
    assert micro_batches
    assert [each for each in micro_batches if each.attributes["elastable.kind"] == "train" and each.parent in versions]
    pushes = {each.id for each in services["elastable-worker"] if each.name == "push"}
    assert [each for each in services["elastable-master"] if each.name == "ReportGradient" and each.parent in pushes]
    assert {"prepare", "append", "apply"} <= {each.name for each in services["elastable-master"]}


def test_every_metric_is_there(watched: Watched, server: Scrape, store_server: Scrape, shards: Scrape) -> None:
    found = watched.master.ours | watched.worker.ours | server.ours | store_server.ours | shards.ours
    asked, took = Counts(), Durations()
    asked.add("v2", "200")
    took.add("v2", 0.1)
    found |= {sample.metric.name for sample in prediction_source(asked, took, 0, 1, 2)}
    of_stream = {sample.metric.name: sample.value for sample in stream_source(StreamStatus(7, 0.5, 3, "no broker"))}
    assert list(of_stream.values()) == [7, 0.5, 3, True]
    found |= of_stream.keys()
    # Nothing was tried again, or something was: that is a matter of chance.
    assert set(METRICS) == found | {"elastable_retries_total"}


class _OfThisTest(Unavailable):
    """Nothing else in the process counts under this name: threads that an earlier test left may try again, too."""


def test_what_was_tried_again_is_shown_by_error() -> None:
    failures: list[Unavailable] = [_OfThisTest("away")]

    def attempt() -> None:
        if failures:
            raise failures.pop()

    def shown() -> float:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return Scrape({each.name: each for each in families}).value("elastable_retries_total", error="_OfThisTest")

    registry = registry_of({"process": partial(process_source, "test")})
    retry(attempt, "a call", 30.0)
    before = shown()
    failures.append(_OfThisTest("away"))
    retry(attempt, "a call", 30.0)
    assert shown() == before + 1


@pytest.fixture(scope="module")
def shards() -> Scrape:
    """What a master shows of its store servers, one of which is away."""
    with served(2) as (servers, store):
        begin(store)
        push_all(store, 0)
        store.commit_pushed(commit(0))
        store.watch.look()
        store.lookup({"any": np.array([1, 2, 3, 4]), "fixed": np.array([1, 2])})
        servers[1].stop()
        store.watch.look()
        sources: dict[str, Source] = {
            "servers": partial(servers_source, store.watch.statuses),
            "shards": partial(shard_lookups_source, store, store),
        }
        registry = registry_of(sources)
        servers[1].start()
        found = text_string_to_metric_families(generate_latest(registry).decode())
        return Scrape({family.name: family for family in found})


def test_the_master_shows_each_of_its_store_servers(shards: Scrape) -> None:
    samples = [s for family in shards.families.values() for s in family.samples if s.name.startswith("elastable_shard")]
    answers = [sample.value for sample in samples if sample.name == "elastable_shard_answers"]
    assert answers == [1, 0]
    assert [sample.value for sample in samples if sample.name == "elastable_shard_version"] == [1, 1]
    assert min(sample.value for sample in samples if sample.name == "elastable_shard_rows") > 0
    commits = [sample for sample in samples if sample.name == "elastable_shard_commit_phase_seconds_count"]
    assert {sample.labels["phase"] for sample in commits} >= {"prepare", "apply"}
    assert {sample.value for sample in commits} == {1}


def test_lookups_are_counted_by_table_and_shard(shards: Scrape) -> None:
    found = shards.families["elastable_shard_lookup_rows"].samples
    servers = {sample.labels["shard"] for sample in shards.families["elastable_shard_answers"].samples}
    rows = {(sample.labels["table"], sample.labels["shard"]): sample.value for sample in found}
    assert {shard for _, shard in rows} <= servers
    assert sum(total for (table, _), total in rows.items() if table == "any") == 4
    assert sum(total for (table, _), total in rows.items() if table == "fixed") == 2
    assert len([table for table, _ in rows if table == "any"]) == 2


def test_the_master_shows_its_job(watched: Watched) -> None:
    job = watched.master
    assert job.value("elastable_job_version") == HELD_AT
    assert job.value("elastable_job_versions") == 40
    assert job.value("elastable_job_state", state="training") == 1
    assert job.value("elastable_job_records_total") == HELD_AT * 64
    assert job.value("elastable_job_expected_records") == 2 * 1_280
    assert 0 < job.value("elastable_job_metric", name="loss") < 10
    # The version that is held has been committed, and its callback is not over.
    assert job.value("elastable_version_seconds_count") == HELD_AT - 1
    for phase in ("wait", "sum", "dense", "rows"):
        assert job.value("elastable_version_phase_seconds_count", phase=phase) == HELD_AT
    assert job.value("elastable_pushes_total", outcome="accepted") >= 2 * HELD_AT


def test_the_master_shows_its_workers(watched: Watched) -> None:
    job = watched.master
    assert job.value("elastable_workers", state="working") + job.value("elastable_workers", state="idle") == 1
    assert job.value("elastable_workers_left_total") == 3
    assert job.value("elastable_workers_joined_total") >= 3
    assert job.value("elastable_worker_failures", error="ModelError") == 1


def test_the_master_shows_its_store(watched: Watched) -> None:
    job = watched.master
    assert job.value("elastable_store_ready") == 1
    assert job.value("elastable_store_version") == HELD_AT
    assert 0 < job.value("elastable_table_rows", table="users") <= 50
    assert job.value("elastable_table_memory_bytes", table="words") > 0
    for phase in ("prepare", "apply", "append"):
        assert job.value("elastable_commit_phase_seconds_count", phase=phase) == HELD_AT
    assert 0 <= job.value("elastable_flush_lag_versions") <= HELD_AT
    assert job.value("elastable_log_bytes") >= 0
    assert job.value("elastable_checkpoint_version") == 8
    assert job.value("elastable_checkpoint_bytes") > 1_000
    assert job.value("elastable_tier_wanted_rows_total", table="users") > 0


def test_the_master_counts_calls_by_method_and_code(watched: Watched) -> None:
    calls = {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for sample in watched.master.families["elastable_grpc_calls"].samples
        if sample.name.endswith("_total")
    }
    assert calls["elastable.master.v1.Master/ReportGradient", "OK"] >= 2 * HELD_AT
    assert calls["elastable.master.v1.Master/Join", "CANCELLED"] >= 1
    refused = [code for method, code in calls if method.endswith("ReportGradient") and code != "OK"]
    assert refused


def test_a_worker_shows_what_it_computes(watched: Watched) -> None:
    worker = watched.worker
    assert worker.value("elastable_worker_micro_batches_total", kind="train", outcome="counted") > 0
    assert worker.value("elastable_worker_records_total") > 0
    assert worker.value("elastable_lookups_total", table="users") > 0
    assert worker.value("elastable_lookup_rows_total", table="words") > 0
    assert worker.value("elastable_worker_phase_seconds_count", phase="compute") > 0
    assert worker.value("elastable_build_info", role="worker") == 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrape]:
    """A parameter server that was asked for rows."""
    home = tmp_path_factory.mktemp("server")
    words = ("serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with elastable(home, *words) as process:
        with RemoteStore(process.address(), deadline_s=60.0) as store:
            store.create_table(TableSpec("cities", dim=2, vocabulary_size=100))
            store.lookup({"cities": np.array([3, 5, 3])})
            store.lookup({"cities": np.array([7])})
        process.url()
        yield scrape(process)


def test_a_server_counts_lookups_by_table(server: Scrape) -> None:
    assert server.value("elastable_lookups_total", table="cities") == 2
    assert server.value("elastable_lookup_rows_total", table="cities") >= 3
    assert server.value("elastable_table_rows", table="cities") == 0
    assert server.value("elastable_build_info", role="server") == 1


@pytest.fixture(scope="module")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrape]:
    """A store server that nobody has claimed."""
    home = tmp_path_factory.mktemp("store-server")
    with elastable(home, "store", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0") as process:
        assert get(f"{process.url()}readyz").status == 200
        yield scrape(process)


def test_a_store_server_shows_what_it_keeps(store_server: Scrape) -> None:
    assert store_server.value("elastable_pushed_gradient_bytes") == 0
    assert store_server.value("elastable_store_server_claimed") == 0
    assert store_server.value("elastable_store_version") == 0
    assert store_server.value("elastable_build_info", role="store") == 1
