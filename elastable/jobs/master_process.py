"""The master's process: serves, drives the job in its main thread, and writes a run directory."""

import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from rich.console import Console

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.measures import LookupCounts
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import servers_url
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.warm import warming
from elastable.embedding_store.wire.access.credentials import GIVEN_TOKEN, Credentials, Role
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.jobs.job_run import JobRun
from elastable.jobs.local_processes import LocalStores, LocalWorkers, StoreAccess
from elastable.jobs.options import JobOptions, StoreServerOptions, WorkerOptions
from elastable.jobs.prepare import PreparedJob, prepare_job
from elastable.jobs.servers.finding import find_servers, server_now
from elastable.jobs.store_watch import StoreHealth
from elastable.master.checkpoints.storage.checkpoint_locations import claimed_checkpoints, require_writable_checkpoints
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.rpc.master_service import master_service
from elastable.monitoring.metrics import (
    Source,
    checkpoint_source,
    job_source,
    server_sources,
    servers_source,
    shard_lookups_source,
    store_source,
)
from elastable.monitoring.page.views import JobView, Watched
from elastable.monitoring.watching import require_watchable, watched_over_http
from elastable.output.run_directory import RunDirectory, require_writable
from elastable.process.heap import keep_collections_short
from elastable.process.logs import describe_process
from elastable.process.repeating import repeating
from elastable.process.stopping import stopping_on_signals
from elastable.worker.keras.tensorflow_threads import set_intra_op_threads

_LEAVE_WAIT_S = 10.0
_LOOK_EVERY_S = 1.0  # at store servers


def run_job(options: JobOptions, console: Console) -> int:
    """Trains as the options say; the exit code."""
    started = time.monotonic()
    # Now, and not when hours of training are to be saved.
    require_watchable(options.http, options.insecure)
    set_intra_op_threads(options.intra_op_threads)
    require_writable(options.run_dir)
    if options.checkpoint_dir is not None:
        require_writable_checkpoints(options.checkpoint_dir)
    access = JobAccess.of(options)
    with ExitStack() as held:
        if options.checkpoint_dir is not None and not (options.overwrite or options.take_over):
            held.enter_context(claimed_checkpoints(options.checkpoint_dir))
        stores, run, stores_access = None, None, None
        if options.local_stores:
            run, stores_access = _run_directory(options, held), StoreAccess.for_run()
            same = ("store", "transport", "client_calls", "client_bytes", "client_rate")
            settings = StoreServerOptions(listen="127.0.0.1:0", **{name: getattr(options, name) for name in same})
            stores = held.enter_context(LocalStores(options.local_stores, settings, run.path, stores_access))
        placed = options
        if options.stores:
            url = find_servers(options.stores, options.deadline_s) if stores is None else stores.url
            placed = replace(options, store=servers_url(url, options.partition), stores=(), partition="token")
        describe_process(role="master")
        prepared = prepare_job(placed, None if stores_access is None else stores_access.credentials)
        held.callback(prepared.store.close)
        master = _master(options, prepared)
        describe_process(job=prepared.job.job)
        keep_collections_short()
        run = run or _run_directory(options, held)
        health, lookups = StoreHealth(), LookupCounts()
        rows = store_service(prepared.store, lookups=lookups, not_ready=health.not_ready)
        services, who = [rows, master_service(master, channels_of(prepared.store))], access.credentials
        limits, insecure = options.limits, options.insecure
        server = GrpcServer(options.listen, services, limits, who, insecure, access.anonymous)
        held.enter_context(server)
        _introduce(console, placed, prepared, run, server.address)
        job = JobRun(options, prepared, master, run, console, health)
        sources: dict[str, Source] = {
            "job": partial(job_source, master),
            "checkpoints": partial(checkpoint_source, job.noted),
            "store": partial(store_source, prepared.store, health.not_ready),
            "servers": partial(servers_source, lambda: master.status().servers),
            "shards": partial(shard_lookups_source, prepared.store, prepared.store),
            **server_sources("master", server, lookups),
        }
        view = JobView(
            master, prepared.store, health.not_ready, job.noted, run.curves, job.resume_command, job.ended_workers
        )
        watched = Watched(sources, server.health.not_ready, view)
        held.enter_context(watched_over_http(options.http, options.insecure, watched, console))
        held.enter_context(stopping_on_signals(master.stop, console))
        if options.local_workers:
            environment = {**access.environment, **({} if stores_access is None else stores_access.workers)}
            worker = _worker_options(options, server.address)
            job.workers = held.enter_context(LocalWorkers(options.local_workers, worker, run.path, environment))
        if isinstance(servers := prepared.store, StoreServers):
            if stores is None:  # one that is not reached is looked for where `--stores` says that it is by now
                servers.follow(lambda number: server_now(options.stores, number, servers.address.split(",")))
            held.enter_context(repeating(servers.watch.look, _LOOK_EVERY_S, "elastable-server-watch"))
        held.enter_context(warming(prepared.store))  # while the workers start, and not when they first ask
        try:
            return job.train(started)
        finally:
            # Serves on for a while, until every worker knows that the job is over, or why it failed.
            give_up = time.monotonic() + _LEAVE_WAIT_S
            while master.status().workers and time.monotonic() < give_up:
                time.sleep(0.05)


def _run_directory(options: JobOptions, held: ExitStack) -> RunDirectory:
    run = RunDirectory.create(options.run_dir)
    held.callback(run.close)
    return run


def _master(options: JobOptions, prepared: PreparedJob) -> Master:
    settings = MasterOptions(
        lease_seconds=options.lease_s,
        backup_after_s=options.backup_after_s,
        commit_deadline_s=options.deadline_s,
        evaluate_every=options.evaluate_every,
        checkpoint_every=options.checkpoint_every,
    )
    parts = prepared.job, prepared.store, prepared.dense, prepared.metrics
    return Master(*parts, start=prepared.progress, options=settings)


def _worker_options(options: JobOptions, address: str) -> WorkerOptions:
    return WorkerOptions(
        master=str(Address.parse(address).for_this_host()),  # a certificate names hosts, and 0.0.0.0 is none
        model=options.model_file,
        deadline_s=options.deadline_s,
        transport=options.transport,
        profile=options.local_profile,
    )


def _introduce(console: Console, options: JobOptions, prepared: PreparedJob, run: RunDirectory, address: str) -> None:
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    tables = ", ".join(
        f"{spec.name} [{'any id' if spec.vocabulary_size is None else f'{spec.vocabulary_size:,}'} x {spec.dim}]"
        for spec in prepared.tables.values()
    )
    job = prepared.job
    say(f"master at {address}, store {redacted(options.store)}, run {run.path}")
    say(f"tables: {tables}")
    say(
        f"{job.train_records:,} records x {job.epochs} epochs, {job.mode}, micro-batches of {job.micro_batch_size}, "
        f"{job.micro_batches_per_version} to a version"
    )
    taken = prepared.resumed or (prepared.warm if not prepared.progress.version else None)
    origin = "" if taken is None else f" from {redacted(taken.address)} of job {taken.job.get('job', '')}"
    if prepared.progress.version:
        say(f"resuming at version {prepared.progress.version}{origin}")
    elif taken is not None:
        say(f"beginning with rows{origin}, version {taken.version}")
    run.begin_job(job.job, address, prepared.progress.version)


# Who may call a job's master: the credentials of its server, and those of the workers that it starts


_OTHER_TOKENS = ("ELASTABLE_TOKEN_FILE", "ELASTABLE_READER_TOKEN_FILE")


@dataclass(frozen=True, slots=True)
class JobAccess:
    """Credentials of a job's processes.

    Workers that the command itself starts have a separate token, made for this job, in their environment. Where
    nobody set a token, they are then the only workers: other callers of this host may look on. Workers that come from
    elsewhere, to `elastable master`, have the token that was set, or need none.

    Attributes:
        credentials: Of the master's server.
        anonymous: The role of callers who show no token; None: as the credentials say (`GrpcServer`).
        environment: Variables in which the environment of local workers differs from the master's.
    """

    credentials: Credentials
    anonymous: Role | None
    environment: Mapping[str, str]

    @classmethod
    def of(cls, options: JobOptions, given: Credentials | None = None) -> Self:
        """For a job that is about to begin.

        Args:
            given: Credentials; None: those of the environment.

        Raises:
            BadInput: server or local workers cannot have such credentials.
        """
        credentials, where = given or Credentials.from_environment(), Address.parse(options.listen)
        credentials.for_server(where, options.insecure)
        if options.local_workers:
            credentials.for_client(where.for_this_host())
        # Workers look rows up at servers that others started; those of this run have separate tokens.
        elsewhere = bool(options.stores) and not options.local_stores
        if not options.local_workers or not _may_have_own(credentials, where, elsewhere):
            return cls(credentials, None, {})
        without = dict.fromkeys(_OTHER_TOKENS, "")
        if credentials.worker_token is not None:
            return cls(credentials, None, without)
        token = secrets.token_hex(32)
        onlookers = None if credentials.tokens else Role.READER
        return cls(replace(credentials, worker_token=token), onlookers, {**without, GIVEN_TOKEN: token})


def _may_have_own(credentials: Credentials, where: Address, rows_elsewhere: bool) -> bool:
    """Whether local workers can do with the workers' token alone."""
    if credentials.tokens:
        # Rows at another server are looked up there, and that server knows nothing of a token made here.
        return credentials.worker_token is not None or not rows_elsewhere
    # Certificates say who is a worker; and so does whoever opens a port in plain text to others than this host.
    return credentials.ca is None and credentials.certificate is None and where.is_loopback
