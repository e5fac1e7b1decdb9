"""The master's process: serves, drives the job in its main thread, and writes checkpoints and a run directory."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Self

from rich.console import Console
from rich.markup import escape

from elastable.callbacks.callback_list import JobCallbacks
from elastable.callbacks.final_weights import finalize_averages
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.pins import PinKeeper
from elastable.embedding_store.errors import CheckpointError, ElastableError, JobFailed, StaleVersion, Unsupported
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.support.store_url import SERVERS, servers_url
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.warm import warming
from elastable.embedding_store.wire.access.credentials import GIVEN_TOKEN, Credentials, Role
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.jobs.engines.engine import LocalEngine, Processes
from elastable.jobs.engines.roles import StoreAccess, start_stores, start_workers, store_options
from elastable.jobs.job_hooks import JobHooks
from elastable.jobs.options import JobOptions, resume_command
from elastable.jobs.prepare import PreparedJob, prepare_job
from elastable.jobs.servers.finding import find_servers, server_now
from elastable.jobs.store_watch import StoreHealth
from elastable.master.api import JobStatus, TaskKind, Tensor
from elastable.master.backend.contract import backend
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.storage.checkpoint_locations import claimed_checkpoints, require_writable_checkpoints
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.model.model_metrics import LazyLogs
from elastable.master.rpc.master_service import master_service
from elastable.master.tasks.progress import Progress
from elastable.monitoring.metrics import (
    Source,
    checkpoint_source,
    job_source,
    server_sources,
    servers_source,
    shard_lookups_source,
    store_source,
    worker_source,
)
from elastable.monitoring.page.views import JobView, Watched
from elastable.monitoring.watching import require_watchable, watched_over_http
from elastable.output.noted import MOST_CHECKPOINTS, CheckpointLog
from elastable.output.progress_bars import JobProgress, summary_table
from elastable.output.run_directory import RunDirectory, require_writable
from elastable.process.child import EndedChild
from elastable.process.exit_codes import ExitCode
from elastable.process.heap import keep_collections_short
from elastable.process.logs import describe_process
from elastable.process.repeating import repeating
from elastable.process.stopping import OUTPUT_CLOSED, SIGNAL_REASONS, stopping_on_signals
from elastable.worker.keras.same_optimizer import note_training
from elastable.worker.readers.streams.event_reader import EventReader
from elastable.worker.runtime.work_here import WorkHere
from elastable.worker.runtime.worker_measures import StepProfile, WorkerMeasures
from elastable.worker.user_model.export import export_keras
from elastable.worker.user_model.model_file import ModelFile

_log = logging.getLogger(__name__)

_LEAVE_WAIT_S = 10.0
_LOOK_AT_SERVERS_S = 1.0


def run_job(options: JobOptions, console: Console) -> int:
    """Trains as the options say; the exit code."""
    started = time.monotonic()
    # Now, and not when hours of training are to be saved.
    require_watchable(options.http, options.insecure)
    backend().set_threads(options.intra_op_threads)
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
            of_each, engine = store_options(options, "127.0.0.1:0"), LocalEngine(run.path)
            servers_here = start_stores(engine, options.local_stores, of_each, stores_access.servers)
            stores = SERVERS + ",".join(held.enter_context(servers_here).addresses())
        placed = options
        if options.stores:
            url = find_servers(options.stores, options.deadline_s) if stores is None else stores
            url = servers_url(url, options.partition)
            origin = url if options.continues_in_place else options.continue_from
            placed = replace(options, store=url, stores=(), partition="token", continue_from=origin)
        describe_process(role="master")
        profile = options.profile if options.works_here else None
        measures = WorkerMeasures(None if profile is None else StepProfile(profile))
        prepared = prepare_job(placed, None if stores_access is None else stores_access.credentials)
        held.callback(prepared.store.close)
        master = _master(options, prepared)
        describe_process(job=prepared.job.job)
        keep_collections_short()
        run = run or _run_directory(options, held)
        health = StoreHealth()
        rows = store_service(prepared.store, lookups=measures.lookups, not_ready=health.not_ready)
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
            **server_sources("master", server, measures.lookups),
        }
        if options.works_here:
            sources["worker"] = partial(worker_source, measures)
        view = JobView(
            master, prepared.store, health.not_ready, job.noted, run.curves, job.resume_command, job.ended_workers
        )
        watched = Watched(sources, server.health.not_ready, view)
        held.enter_context(watched_over_http(options.http, options.insecure, watched, console))
        held.enter_context(stopping_on_signals(master.stop, console))
        if options.own_workers and not options.works_here:
            environment = {**access.environment, **({} if stores_access is None else stores_access.workers)}
            where = str(Address.parse(server.address).for_this_host())  # a certificate names hosts; 0.0.0.0 is none
            job.workers = held.enter_context(start_workers(LocalEngine(run.path), options, environment, where))
        if isinstance(servers := prepared.store, StoreServers):
            if stores is None:  # one that is not reached is looked for where `--stores` says that it is by now
                servers.follow(lambda number: server_now(options.stores, number, servers.address.split(",")))
            held.enter_context(repeating(servers.watch.look, _LOOK_AT_SERVERS_S, "elastable-server-watch"))
        held.enter_context(warming(prepared.store))  # while the workers start, and not when they first ask
        if options.works_here:
            of_worker = prepared.computer(options.deadline_s), prepared.store, options.deadline_s, measures
            job.worker = partial(WorkHere, master, *of_worker)
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
        linger_s=options.linger_s,
        until=options.until,
        max_bad_events=options.max_bad_events,
        concurrent_evaluation=not options.works_here,
    )
    parts = prepared.job, prepared.store, prepared.dense, prepared.metrics
    train = prepared.readers.get(TaskKind.TRAIN)
    events = train if isinstance(train, EventReader) else None
    return Master(*parts, start=prepared.progress, options=settings, events=events)


def _introduce(console: Console, options: JobOptions, prepared: PreparedJob, run: RunDirectory, address: str) -> None:
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    tables = ", ".join(
        f"{spec.name} [{'any id' if spec.vocabulary_size is None else f'{spec.vocabulary_size:,}'} x {spec.dim}]"
        for spec in prepared.tables.values()
    )
    job = prepared.job
    say(f"master at {address}, store {redacted(options.store)}, run {run.path}")
    say(f"tables: {tables}")
    what = f"a stream, {job.train_records:,} events" if job.stream else f"{job.train_records:,} records"
    epochs = f"{what} x {job.epochs} epochs" if job.epochs else f"{what} an epoch"
    say(f"{epochs}, {job.mode}, micro-batches of {job.micro_batch_size}, {job.micro_batches_per_version} to a version")
    taken = prepared.resumed or (prepared.warm if not prepared.progress.version else None)
    origin = "" if taken is None else f" from {redacted(taken.address)} of job {taken.job.get('job', '')}"
    if prepared.progress.version == job.versions_before > 0:
        say(f"continuing from {redacted(str(options.continue_from))}, version {job.versions_before}")
    elif prepared.progress.version:
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
        if options.own_workers:
            credentials.for_client(where.for_this_host())
        # Workers look rows up at servers that others started; those of this run have separate tokens.
        elsewhere = bool(options.stores) and not options.local_stores
        if not options.own_workers or not _may_have_own(credentials, where, elsewhere):
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


# The run of a job: its display, its callbacks and checkpoints, its results


# Of the pin of a version while it is written; a master that takes the place of one that died waits for its pins.
_LEASE_S = 30.0
_RENEW_EVERY_S = 5.0
_LOOK_EVERY_S = 0.5

Begin = Callable[[Snapshot, Mapping[str, Tensor], Progress], Callable[[], str]]
"""Begins a checkpoint of (rows, dense tensors, progress); what it returns writes it, and returns where it is."""


class CheckpointWriter:
    """Writes one checkpoint at a time, in a separate thread.

    Where one is due while the one before it is being written, training waits: none is left out. One that fails is
    warned of, and the next one is tried: hours of training are not to end because a disk is full for a while. If its
    pin was given up, training waits while the next one is written. The last one of a job raises.

    Args:
        begin: Begins a checkpoint, in the thread that commits (`CheckpointSeries.begin`).
        deadline_s: How long the last one of a job is tried again while the store fails.
        log: Where each of them is noted; None: nowhere.
    """

    def __init__(
        self, store: EmbeddingStore, begin: Begin, deadline_s: float = 60.0, log: CheckpointLog | None = None
    ) -> None:
        self._noted = log or CheckpointLog()
        self._store = store
        self._deadline_s = deadline_s
        self._begin = begin
        self._thread = ThreadPoolExecutor(1, "elastable-checkpoint")
        self._writing: Future[None] | None = None
        self._outrun = False

    def begin(self, dense: Mapping[str, Tensor], progress: Progress) -> None:
        """Begins to write the current version; call it between two commits."""
        self.wait()
        version, pin = progress.version, None
        try:
            with suppress(Unsupported):
                pin = None if self._outrun else self._store.pin(version, _LEASE_S)
        except ElastableError as error:
            self._failed(version, time.monotonic(), f", it cannot be pinned: {error}")
            return
        if pin is None:
            self._warned(lambda: self._begin(self._store, dense, progress)(), version)
            return
        try:
            write = self._begin(pin, dense, progress)
        except ElastableError as error:
            self._failed(version, time.monotonic(), f": {error}")
            pin.close()
            return

        def write_from_pin() -> None:
            with PinKeeper(pin, _RENEW_EVERY_S, f"the checkpoint of version {version}"):
                self._warned(write, version)

        self._writing = self._thread.submit(write_from_pin)

    def finish(self, dense: Mapping[str, Tensor], progress: Progress) -> str:
        """Writes the last version of a job, when nothing is committed any more; returns where it is.

        Raises:
            CheckpointError: it cannot be written.
            StoreFailed, Unavailable: the store failed until the deadline.
        """
        self.wait()
        begun = time.monotonic()
        place = retry(lambda: self._begin(self._store, dense, progress)(), "the last checkpoint", self._deadline_s)
        self._written(progress.version, begun, place)
        return place

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """Waits for what is being written, and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _warned(self, write: Callable[[], str], version: int) -> None:
        self._outrun = False
        begun = time.monotonic()
        try:
            place = write()
        except ElastableError as error:
            # Training changed more rows meanwhile than may be kept: it waits for the next one.
            self._outrun = isinstance(error, StaleVersion)
            ours = isinstance(error, StaleVersion | CheckpointError)
            self._failed(version, begun, f": {error}" if ours else f", the store failed: {error}")
        else:
            self._written(version, begun, place)

    def _written(self, version: int, begun: float, place: str) -> None:
        seconds = time.monotonic() - begun
        _log.info("checkpoint of version %d written in %.2f s: %s", version, seconds, place, extra={"version": version})
        self._noted.note(version, seconds, place)

    def _failed(self, version: int, begun: float, why: str) -> None:
        _log.warning("no checkpoint of version %d%s", version, why, extra={"version": version})
        self._noted.note_failure(version, time.monotonic() - begun, why.lstrip(":, "))


def _worked(work: Callable[[], bool], file: ModelFile) -> bool:
    """What `work` returns; an error of the model or its data, which is none of a callback, is told and named."""
    try:
        return work()
    except ElastableError:
        raise
    except Exception as error:
        _log.exception("a micro-batch failed")
        failed = JobFailed(f"the worker of this process: {type(error).__name__}: {error}")
        raise file.blamed("training", error) or failed from error


class JobRun:
    """Drives a job from its first version to its last.

    Args:
        run: Directory for its results.
        console: Where a person looks.
        health: Of the store, while it trains.

    Attributes:
        workers: Worker processes to look after; None: the command started none.
        worker: Makes the worker of this process; None: it has none.
        noted: Its checkpoints: those that it writes, and those that were there when it began.
    """

    def __init__(
        self,
        options: JobOptions,
        prepared: PreparedJob,
        master: Master,
        run: RunDirectory,
        console: Console,
        health: StoreHealth,
    ) -> None:
        self._options = options
        self._prepared = prepared
        self._master = master
        self._run = run
        self._console, self._health = console, health
        self.workers: Processes | None = None
        self.worker: Callable[[], WorkHere] | None = None
        self.noted = CheckpointLog()
        self._checkpoints = options.checkpoint_dir or run.path / "checkpoints"
        self._series = CheckpointSeries(
            self._checkpoints,
            prepared.store,
            keep=options.keep,
            full_every=options.full_every if options.checkpoint_every else 1,
            resumed=prepared.resumed,
        )
        for found in self._series.standing(prepared.job.job, MOST_CHECKPOINTS) if prepared.progress.version else []:
            written = datetime.fromisoformat(found.manifest.written).timestamp()
            self.noted.note_earlier(found.version, written, found.address, found.manifest.size)
        self._writer = CheckpointWriter(
            prepared.store,
            lambda rows, dense, progress: self._series.begin(rows, dense, prepared.job, progress),
            options.deadline_s,
            self.noted,
        )

    def ended_workers(self) -> list[EndedChild]:
        """Worker processes that the command has started and that have failed."""
        return [] if self.workers is None else self.workers.failed()

    def train(self, started: float) -> int:
        """Drives the job to its end; the exit code.

        Args:
            started: `time.monotonic()` when the command started.
        """
        prepared, job = self._prepared, self._prepared.job
        progress = JobProgress(self._console, job.train_records * job.epochs, prepared.progress.records)
        self._series.require_reached(prepared.progress.version)
        callbacks, hooks = self._callbacks(progress)
        show = repeating(lambda: self._look(progress), _LOOK_EVERY_S, "elastable-watch")
        lost, least = partial(self._master.report_failure, "store", fatal=True), lambda: self._master.status().version
        watched = self._health.watching(prepared.store, lost, least, self._options.deadline_s)
        with progress, closing(self._writer), show, watched:
            callbacks.begin(prepared.progress.hooks)
            _log.info("job %s begins at version %d", prepared.job.job, prepared.progress.version)
            try:
                if prepared.resumed is None and prepared.progress.version > job.versions_before:
                    # At the store's own version.
                    hooks.go_on(LazyLogs(lambda: prepared.metrics.results(prepared.progress.metrics)))
                self._drive(hooks)
                status = self._master.status()
            except Exception as error:
                if (blamed := prepared.file.blamed("a callback", error)) is not None:
                    raise blamed from error
                raise
            if not self._interrupted:  # an interrupted job continues with the weights as they are
                self._writer.wait()
                finalize_averages(prepared.dense, prepared.store, prepared.tables, self._series.rows_changed)
            callbacks.end(hooks.logs)
            checkpoint = self._writer.finish(prepared.dense.tensors(), self._master.progress())
        _log.info(
            "job %s ends at version %d: %s", status.job, status.version, self._master.stop_reason or "all is trained"
        )
        self._finish(hooks, checkpoint, status, time.monotonic() - started)
        if not self._interrupted:
            return ExitCode.DONE
        self._show_how_to_continue(status.version)
        return ExitCode.OUTPUT_CLOSED if self._master.stop_reason == OUTPUT_CLOSED else ExitCode.INTERRUPTED

    def _drive(self, hooks: JobHooks) -> None:
        if self.worker is None:
            self._master.run(hooks)
            return
        with closing(self.worker()) as work:
            self._master.run(hooks, partial(_worked, work, self._prepared.file))

    @property
    def _interrupted(self) -> bool:
        return self._master.stop_reason in SIGNAL_REASONS.values()

    def _callbacks(self, progress: JobProgress) -> tuple[JobCallbacks, JobHooks]:
        prepared, job, begin = self._prepared, self._prepared.job, self._prepared.progress
        note_training(prepared.model, elsewhere=True)
        joined = JobCallbacks(
            prepared.file.callbacks(),
            prepared.model,
            prepared.dense,
            prepared.store,
            job,
            self._master.progress,
            directory=f"{self._checkpoints}/best",
            rows_changed=self._series.rows_changed,
        )
        hooks = JobHooks(
            joined,
            self._master.stop,
            self._run,
            lambda: self._writer.begin(prepared.dense.tensors(), self._master.progress()),
            self._options.checkpoint_every,
            partial(progress.epoch, job.epochs),
            progress.evaluation,
            self._series.committed,
            begin.version,
            written=lambda: sum(prepared.store.table_statistics(name).written for name in prepared.tables),
        )
        hooks.logs = begin.logs  # a job that is resumed may have nothing left to do
        return joined, hooks

    @property
    def resume_command(self) -> str:
        """What to type to go on with the job where it ends."""
        return resume_command(self._options, self._checkpoints)

    def _show_how_to_continue(self, version: int) -> None:
        line = f"{self._master.stop_reason} at version {version:,}; go on with:\n{self.resume_command}"
        if self._master.stop_reason == OUTPUT_CLOSED:
            _log.warning("%s", line)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _look(self, progress: JobProgress) -> None:
        """Shows the job, and looks after local workers."""
        progress.show(self._master.status())
        if self.workers is None or self._master.stop_reason is not None:
            # They leave as soon as the job stops, while the last commit or a callback may still run.
            return
        for line in self.workers.newly_dead():
            self._console.print(f"[yellow]{escape(line)}[/yellow]", highlight=False)
        try:
            self.workers.require_some_alive()
        except ElastableError as error:
            if self._master.not_ready() is None:  # asked last: they also leave once all is trained, and callbacks end
                self._master.report_failure("local workers", error, fatal=True)

    def _finish(self, hooks: JobHooks, checkpoint: str, status: JobStatus, total_seconds: float) -> None:
        job, store, exported = self._prepared.job, self._prepared.store, self._export()
        servers = store.watch if isinstance(store, StoreServers) else None
        if servers is not None:
            servers.look()
        trained = max(0, status.records_trained - self._prepared.progress.records)
        timed = max(0, trained - hooks.untimed_records)
        seconds = hooks.seconds
        result: dict[str, object] = {
            # The first AUC of the validation split, whatever its metric is called: "auc", "AUC", "auc_1".
            "auc": next((value for name, value in hooks.logs.items() if name.lower().startswith("val_auc")), None),
            "examples": trained,
            "seconds": seconds,
            "timed_examples": timed,
            "examples_per_second": timed / seconds if seconds > 0 else 0.0,
            "total_seconds": total_seconds,
            "version": status.version,
            "workers": self._master.contributors,
            # The store that the job was given; of store servers, their addresses.
            "store": redacted(self._options.store if servers is None else job.store_url),
            "store_servers": [
                {"address": of.address, "store": of.shard.store if of.shard is not None else None}
                for of in ([] if servers is None else servers.statuses())
            ],
            "mode": job.mode,
            "epochs": job.epochs,
            "seed": job.seed,
            "metrics": dict(hooks.logs),
            "checkpoint": checkpoint,
            "model": exported,
            "stopped": self._master.stop_reason,
        }
        self._run.finish(result)
        paths = {"run": str(self._run.path), "checkpoint": checkpoint}
        if exported:
            paths["model"] = exported
        self._console.print(summary_table(result, hooks.logs, paths))

    def _export(self) -> str | None:
        if not self._options.export:
            return None
        try:
            return str(export_keras(self._prepared.model, self._prepared.store, self._run.path / "model.keras"))
        except Unsupported as error:
            self._console.print(f"[yellow]not exported: {escape(str(error))}[/yellow]", highlight=False)
            return None
