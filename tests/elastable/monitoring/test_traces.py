"""Traces of a job with store servers, exported to a real collector: one trace a version, over all its processes."""

import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

import elastable as et
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.errors import BadInput, NotInstalled
from elastable.embedding_store.measures import PROCESS, Durations, VersionTrace, carried, span
from elastable.embedding_store.wire.channels.server_connection import TracedChannel, channel
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import JobSpec, TaskKind, WorkerIdentity
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.model.dense import DenseState
from elastable.master.model.discovery import create_tables, discover_tables
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.monitoring.tracing import exporting_traces
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.runtime.loop import Worker
from elastable.worker.runtime.worker_measures import WorkerMeasures
from elastable.worker.user_model.build import build_model, sample_batch
from tests.elastable.monitoring.otlp_collector import ExportedSpan, collecting
from tests.embedding_store.shards.served_shards import served
from tests.ports import free_address
from tests.worker.runtime.test_loop import IDS, LABELS, _model

LIMIT_S = 240.0
VERSIONS, TO_A_VERSION, SERVERS = 3, 2, 2
READER = NumpyReader(IDS[: 16 * VERSIONS * TO_A_VERSION], LABELS[: 16 * VERSIONS * TO_A_VERSION])
SAMPLE = sample_batch(READER)
JOB = JobSpec(job="job", micro_batch_size=16, train_records=16 * VERSIONS * TO_A_VERSION, grads_to_wait=TO_A_VERSION)


@dataclass
class Traced:
    """What a job left."""

    spans: list[ExportedSpan]
    master: Durations
    versions: Durations
    worker: Durations

    def named(self, name: str) -> list[ExportedSpan]:
        return [each for each in self.spans if each.name == name]

    def inside(self, outer: ExportedSpan) -> list[str]:
        """Names of the spans right inside of one."""
        return sorted(each.name for each in self.spans if (each.trace, each.parent) == (outer.trace, outer.id))


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Exports may take as long as a busy machine needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
        yield


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    """A job of a master, a worker and two store servers, over gRPC."""
    with collecting() as collector:
        with exporting_traces(collector.url, "elastable-test"), served(SERVERS) as (servers, store):
            measures = _run(store, [server.address for server in servers])
        yield Traced(collector.spans(), *measures)


def _run(store: StoreServers, addresses: list[str]) -> tuple[Durations, Durations, Durations]:
    model = _model()
    build_model(model, SAMPLE)
    create_tables(store, discover_tables(model, 0))
    options = MasterOptions(lease_seconds=LIMIT_S)  # a micro-batch is computed once, however long it takes
    master = Master(JOB, store, DenseState(model), ModelMetrics(model), options=options)
    running = threading.Thread(target=master.run, daemon=True)
    with GrpcServer("127.0.0.1:0", [store_service(store), master_service(master)]) as server:
        running.start()
        measures = _work(server.address, addresses)
        running.join(LIMIT_S)
    assert not running.is_alive()
    assert master.status().version == VERSIONS
    return master.measures.phases, master.measures.versions, measures.phases


def _work(address: str, addresses: list[str]) -> WorkerMeasures:
    model, identity, measures = _model(), WorkerIdentity("worker"), WorkerMeasures()
    build_model(model, SAMPLE)
    with (
        MasterClient(address, deadline_s=LIMIT_S) as client,
        StoreServers([ShardClient(each, LIMIT_S) for each in addresses], LIMIT_S) as rows,
    ):
        session = client.join(identity)
        computer = MicroBatchComputer(model, session.job, {TaskKind.TRAIN: READER}, SAMPLE, rows, rows.specs())
        Worker(client, computer, rows, session, identity, LIMIT_S, measures=measures, rows_to=rows).run()
    return measures


def test_every_version_is_one_trace_and_all_spans_belong_to_one(traced: Traced) -> None:
    versions = traced.named("version")
    assert [each.attributes["elastable.version"] for each in versions] == list(range(1, VERSIONS + 1))
    assert {each.attributes["elastable.job"] for each in versions} == {"job"}
    assert {each.parent for each in versions} == {""}
    assert len({each.trace for each in versions}) == VERSIONS
    assert {each.trace for each in traced.spans} == {each.trace for each in versions}
    assert {each.service for each in traced.spans} == {"elastable-test"}
    known = {(each.trace, each.id) for each in traced.spans}
    assert [each.name for each in traced.spans if each.parent and (each.trace, each.parent) not in known] == []


def test_a_version_holds_its_phases_and_its_micro_batches(traced: Traced) -> None:
    for version in traced.named("version"):
        inside = Counter(traced.inside(version))
        assert inside.pop("lookup ahead", 0) <= TO_A_VERSION
        inside.pop("GetStoreStatus", None)  # the first version asks the servers whether they keep records
        assert inside == {
            **dict.fromkeys(("wait", "sum", "dense", "rows", "callbacks"), 1),
            "micro-batch": TO_A_VERSION,
        }
        (rows,) = [each for each in traced.named("rows") if each.parent == version.id]
        assert traced.inside(rows) == ["CommitPushed"] * SERVERS
        assert version.start_ns <= rows.start_ns <= rows.end_ns <= version.end_ns
    numbers = [each.attributes["elastable.micro_batch"] for each in traced.named("micro-batch")]
    assert len(set(numbers)) == len(numbers) == VERSIONS * TO_A_VERSION


def test_the_calls_of_a_micro_batch_and_of_a_commit_are_spans_of_the_servers(traced: Traced) -> None:
    for micro_batch in traced.named("micro-batch"):
        assert traced.inside(micro_batch) == ["compute", "lookup", "push"]
    for push in traced.named("push"):
        assert Counter(traced.inside(push)) == {"PushRows": SERVERS, "ReportGradient": 1}
    for commit in traced.named("CommitPushed"):
        assert traced.inside(commit) == ["append", "apply", "prepare"]
        assert commit.attributes["rpc.service"] == "elastable.embedding_store.v1.Store"
    looked_up = {each.id for name in ("lookup", "lookup ahead") for each in traced.named(name)}
    lookups = [each for each in traced.spans if each.name.startswith("Lookup")]
    assert len(lookups) >= VERSIONS * TO_A_VERSION
    assert {each.parent for each in lookups} <= looked_up
    assert not any(each.failed for each in traced.named("version"))


def test_one_timing_feeds_spans_and_metrics(traced: Traced) -> None:
    seen = Counter(each.name for each in traced.spans)
    for measured, phases in (
        (traced.master, ("wait", "sum", "dense", "rows", "callbacks")),
        (traced.versions, ("version",)),
        (traced.worker, ("lookup", "compute", "push")),
    ):
        for phase in phases:
            assert measured.histograms()[phase].count == seen[phase] > 0


def test_an_error_is_the_status_of_its_span_and_nothing_is_a_span_outside_of_a_trace() -> None:
    durations = Durations()
    with collecting() as collector:
        with exporting_traces(collector.url, "s"):
            with durations.timing("outside"):
                durations.add("waited", 1.0)
            with pytest.raises(KeyError), durations.timing_version(0.0, VersionTrace("j", 1)), durations.timing("in"):
                raise KeyError("no such row")
        found = {each.name: each for each in collector.spans()}
    assert set(found) == {"version", "in"}
    assert found["version"].failed
    assert found["in"].failed
    assert list(durations.histograms()) == ["waited", "outside"]


def test_tracing_draws_no_random_numbers_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # the collector is away: one attempt, and a pause
    ids = []
    for _ in range(2):
        random.seed(3)
        expected = random.getstate()
        with collecting() as collector:
            version = Durations().timing_version(0.0, VersionTrace("j", 1))
            with exporting_traces(collector.url, "s"), version, Durations().timing("inner"):
                pass
            ids += [each.id for each in collector.spans() if each.name == "inner"]
        with exporting_traces(f"http://{free_address()}", "s"), span("micro-batch", VersionTrace("j", 1)):
            pass
        assert random.getstate() == expected
    assert len(set(ids)) == 2


def test_a_sampler_takes_the_same_versions_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    versions = [VersionTrace("job", number) for number in range(40)]
    with collecting() as collector:
        with exporting_traces(collector.url, "master"):
            for trace in versions:
                with Durations().timing_version(0.0, trace):
                    pass
        with exporting_traces(collector.url, "worker"):
            for trace in versions:
                with span("micro-batch", trace):
                    pass
        taken = {
            service: {each.trace for each in collector.spans() if each.service == service}
            for service in ("master", "worker")
        }
    assert taken["master"] == taken["worker"]
    assert 0 < len(taken["master"]) < len(versions)


def test_what_a_client_shows_as_its_span_may_be_anything() -> None:
    hostile = [
        "",
        "00",
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "x" * 4_000,
        "ff-" + "a" * 32 + "-" + "b" * 16 + "-01",
    ]
    with (
        collecting() as collector,
        exporting_traces(collector.url, "s"),
        served(1) as ((server,), _),
        grpc.insecure_channel(server.address) as plain,
    ):
        call = plain.unary_unary("/elastable.embedding_store.v1.Store/GetStoreStatus", None, None)
        for shown in hostile:
            call(b"", metadata=(("traceparent", shown),), timeout=60)
        call(b"", metadata=(("traceparent", "a"), ("traceparent", "b")), timeout=60)


@pytest.mark.parametrize(
    "url", ["collector:4317", "http://collector", "ftp://c:1", "http://u:secret@c:4317", "http://c:x"]
)
def test_what_is_no_collector_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match=r"--traces .*write http://HOST:4317") as refused, exporting_traces(url, "s"):
        pass
    assert "secret" not in str(refused.value)


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(BadInput, match=r"http/protobuf: .*over grpc"), exporting_traces("http://c:1", "s"):
        pass


def test_a_program_that_trains_in_its_own_process_is_traced() -> None:
    model = _model()
    model.compile(optimizer="sgd", loss="binary_crossentropy")
    with collecting() as collector:
        with et.exporting_traces(collector.url):
            model.fit(IDS[:64], LABELS[:64], batch_size=16, epochs=1, verbose=0)
        spans = collector.spans()
    versions = [each for each in spans if each.name == "version"]
    assert [each.attributes["elastable.version"] for each in versions] == [1, 2, 3, 4]
    assert {each.service for each in spans} == {"elastable"}
    for version in versions:
        inside = {each.name for each in spans if each.parent == version.id}
        assert {"sum", "dense", "rows", "micro-batch"} <= inside
    (commit, *_) = [each for each in spans if each.name == "apply"]
    assert commit.parent in {each.id for each in spans if each.name == "rows"}


@pytest.mark.parametrize("lacking", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"])
def test_without_the_extra_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    for name in [each for each in sys.modules if each.startswith((f"{lacking}.", "elastable.monitoring.opentele"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lacking, None)
    with (
        pytest.raises(NotInstalled, match=r"--traces needs .*elastable\[traces\]"),
        exporting_traces("http://c:1", "s"),
    ):
        pass


def test_a_process_that_is_not_traced_makes_nothing_for_it() -> None:
    assert PROCESS.tracer is None

    def call() -> int:
        return 1

    assert carried(call) is call
    with channel("127.0.0.1:1") as opened:
        assert not isinstance(opened, TracedChannel)
