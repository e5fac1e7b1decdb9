"""A worker process from its start to the end of the job."""

import logging
import signal
from functools import partial
from types import FrameType

from rich.console import Console

from elastable.embedding_store.composite.partitioned_store import PartitionedSource
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.errors import (
    ElastableError,
    JobFailed,
    ModelError,
    NotReady,
    PermissionDenied,
    ShardLost,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from elastable.embedding_store.open_store import GRPC_DEADLINE_S, operation_deadline
from elastable.embedding_store.shards.server_contract import ShardStore
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.support.store_url import SERVERS, server_addresses
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.embedding_store.wire.shared.shared_source import SharedSource
from elastable.jobs.options import WorkerOptions
from elastable.jobs.servers.finding import Peers
from elastable.master.api import JobSpec, JobStatus, TaskKind, WorkerIdentity
from elastable.master.backend.contract import backend
from elastable.master.rpc.client import MasterClient
from elastable.monitoring.metrics import Source, lookups_source, process_source, shard_lookups_source, worker_source
from elastable.monitoring.page.views import Watched
from elastable.monitoring.watching import require_watchable, watched_over_http
from elastable.process.exit_codes import ExitCode
from elastable.process.logs import describe_process
from elastable.process.stopping import SIGNAL_REASONS
from elastable.worker.layers.model_tables import forget_rows, store_layers
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.rows.saved_rows import leaving_rows_out
from elastable.worker.runtime.compute import MicroBatchComputer, require_same_records
from elastable.worker.runtime.loop import Worker
from elastable.worker.runtime.worker_measures import StepProfile, WorkerMeasures
from elastable.worker.user_model.build import for_model, make_model, sample_batch
from elastable.worker.user_model.model_file import ModelFile, load_model_file

_log = logging.getLogger(__name__)

_ADDRESS_S = 2.0  # for the question where a store server is, which the next try asks again


def run_worker(options: WorkerOptions) -> int:
    """Joins a job and works until it ends, or a signal says so.

    Returns:
        The exit code: after a signal another one than at the job's end, as whoever starts workers then starts another.

    Raises:
        JobFailed: the master was stopped before the job's last version.
        ElastableError: why it did not join, or left. A model file or data that differ from the master's send away this
            worker alone; what fails in the model itself would fail on every worker, and ends the job.
    """
    require_watchable(options.http, options.insecure)
    deadline_s = options.deadline_s
    peers = Peers.parse("--master", options.master)
    addresses = peers.wait(deadline_s)
    client = (
        MasterClient(options.master, deadline_s)
        if peers.listed
        else MasterClient(addresses[0], deadline_s, find=peers.other_than)
    )
    identity = WorkerIdentity.of_this_process()
    try:
        session = client.join(identity)
    except Unsupported as error:
        raise ModelError(
            "the server trains no model (it is the parameter server of elastable serve); it has no work for workers"
        ) from error
    job = session.job
    describe_process(role="worker", job=job.job, worker=identity.incarnation)
    everywhere = False
    try:
        _require_backend(job)
        backend().set_threads(job.intra_op_threads)
        source, servers = _source(job, client, options.transport, deadline_s)
        file = load_model_file(options.model or job.model_file, job.model_sha256)
        readers = _readers(job, file)
        everywhere = True
        computer = _computer(job, file, readers, source, deadline_s)
        measures = WorkerMeasures(None if options.profile is None else StepProfile(options.profile))
        worker = Worker(
            client, computer, source, session, identity, deadline_s=deadline_s, measures=measures, rows_to=servers
        )
    except Exception as error:
        local = Unavailable | ShardLost | Unauthenticated | PermissionDenied | MemoryError
        fatal = everywhere and not isinstance(error, local)
        if session.alive():
            try:
                client.report_failure(identity.incarnation, error, fatal)
            except ElastableError as silence:
                _log.warning("%s could not be reported to the master: %s", error, silence)
        session.close()
        raise

    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        _log.info("signal %d: leaving after this micro-batch", number)
        told.append(number)
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sources: dict[str, Source] = {
        "worker": partial(worker_source, measures),
        "lookups": partial(lookups_source, measures.lookups),
        "shards": partial(shard_lookups_source, source, servers),
        "process": partial(process_source, "worker"),
    }
    with watched_over_http(options.http, options.insecure, Watched(sources, worker.not_ready), Console()):
        counted = worker.run()
    refuse_early_end(worker.job_ended)
    _log.info("%d micro-batches counted; %s", counted, "left as told" if told else "the job is over")
    return ExitCode.INTERRUPTED if told else ExitCode.DONE


def _require_backend(job: JobSpec) -> None:
    """Raises `Unsupported` where Keras runs on another backend here than at the master, whose numbers are others."""
    here = backend().name
    if job.backend not in ("", here):
        raise Unsupported(
            f"the job computes on Keras' backend {job.backend}, and this worker on {here}: start it with "
            f"KERAS_BACKEND={job.backend}"
        )


def refuse_early_end(ended: JobStatus | None) -> None:
    """A signal ended the master and not the job: whoever starts masters again is to start workers again, too."""
    # By its reason and not its state: a master that was asked to stop may be through with its last version by now.
    if ended is not None and ended.stopped in SIGNAL_REASONS.values():
        raise JobFailed(
            f"the master was {ended.stopped} at version {ended.version:,} of {ended.versions_total:,}; start this "
            "worker again for the master that resumes the job"
        )


def _source(
    job: JobSpec, client: MasterClient, transport: str, deadline_s: float
) -> tuple[RowSource, ShardStore | None]:
    """Where rows are looked up; and the job's store servers, if it has some, to which their gradients go."""
    if job.store_url.startswith(SERVERS):
        source, store = _servers(job.store_url, transport, operation_deadline(deadline_s))

        def address_now(number: int) -> str | None:
            """Where the master last found one of its store servers; None: nowhere."""
            with MasterClient(client.address, _ADDRESS_S) as master:
                servers = master.status().servers
            return servers[number].address if number < len(servers) else None

        store.follow(address_now)
        return source, store
    if job.store_url != "master":
        raise Unsupported(
            "the master says that rows are at a store that workers do not know: it is of another release; start master "
            "and workers from the same one"
        )
    if transport == "grpc":
        return client.store(), None
    client.share_memory()
    return SharedSource(client.store(), required=transport == "shared", ahead=True), None


def _servers(url: str, transport: str, deadline_s: float | None) -> tuple[RowSource, StoreServers]:
    """The job's store servers: from memory where they are on this host, else over gRPC."""
    deadline_s, credentials = deadline_s or GRPC_DEADLINE_S, Credentials.for_store_servers()
    clients = [ShardClient(address, deadline_s, credentials) for address in server_addresses(url)]
    store = StoreServers(clients)
    if transport == "grpc":
        return store, store
    for each in clients:
        each.share_memory()
    return PartitionedSource([SharedSource(each, required=transport == "shared") for each in clients]), store


def _readers(job: JobSpec, file: ModelFile) -> dict[TaskKind, Reader]:
    readers = {TaskKind.TRAIN: file.train_reader()}
    if job.validation_records and (validation := file.reader("validation")) is not None:
        readers[TaskKind.EVALUATE] = validation
    require_same_records(job, readers)
    return readers


def _computer(
    job: JobSpec, file: ModelFile, readers: dict[TaskKind, Reader], source: RowSource, deadline_s: float
) -> MicroBatchComputer:
    with leaving_rows_out():  # the master has them
        model = make_model(file.model, readers[TaskKind.TRAIN], job.seed, job.offload_above, job.on_worker)
    forget_rows(store_layers(model))
    train = for_model(readers[TaskKind.TRAIN], model)
    readers = {**readers, TaskKind.TRAIN: train}
    specs = retry(source.specs, "reading the tables", deadline_s, on=(NotReady,))
    return MicroBatchComputer(model, job, readers, sample_batch(train, model), source, specs, deadline_s)
