"""The master's process: serves, drives the job in its main thread, and leaves a run directory."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from elastable.callbacks.averages import finalize_averages
from elastable.callbacks.best_versions import BestVersions
from elastable.callbacks.callback_list import JobCallbacks
from elastable.callbacks.freezing import Freezing
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.errors import ElastableError, Unsupported
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.login import split_login
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.warm import warming
from elastable.embedding_store.wire.channels.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.jobs.checkpoint_writer import CheckpointWriter
from elastable.jobs.job_access import JobAccess
from elastable.jobs.job_hooks import JobHooks
from elastable.jobs.local_workers import LocalWorkers
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import PreparedJob, prepare_job
from elastable.jobs.store_watch import watching_store
from elastable.master.api import Tensor
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.storage.checkpoint_locations import require_writable_checkpoints
from elastable.master.jobs.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.master.wire.master_service import master_service
from elastable.output.progress_bars import JobProgress, summary_table
from elastable.output.run_directory import RunDirectory, require_writable
from elastable.process.audit_lines import show_audit_log
from elastable.process.exit_codes import ExitCode
from elastable.process.stopping import SIGNAL_REASONS, stopping_on_signals
from elastable.worker.keras.tensorflow_threads import set_intra_op_threads
from elastable.worker.models.export import export_keras

__all__ = ["run_job"]

_LOOK_EVERY_S = 0.5
_LEAVE_WAIT_S = 10.0


def run_job(options: JobOptions, local_workers: int, console: Console, command: Sequence[str] = ()) -> int:
    """Trains as the options say; the exit code.

    Args:
        options: The job.
        local_workers: Worker processes to start here; 0: they come by themselves.
        console: Where a person looks.
        command: The words of the command that runs this job, without what says where it begins; shown with
            `--resume` when the job is interrupted.
    """
    set_intra_op_threads(options.intra_op_threads)
    began = time.monotonic()
    # Now, and not when hours of training are to be saved.
    require_writable(options.run_dir)
    if options.checkpoint_dir is not None:
        require_writable_checkpoints(options.checkpoint_dir)
    show_audit_log()
    access = JobAccess.of(options, local_workers)
    prepared = prepare_job(options)
    with ExitStack() as held:
        held.callback(prepared.store.close)
        master = Master(
            prepared.job,
            prepared.store,
            prepared.dense,
            prepared.metrics,
            start=prepared.progress,
            options=MasterOptions(
                lease_seconds=options.lease_s,
                backup_after_s=options.backup_after_s,
                commit_deadline_s=options.deadline_s,
                evaluate_every=options.evaluate_every,
                checkpoint_every=options.checkpoint_every,
            ),
        )
        run = RunDirectory.create(options.run_dir)
        held.callback(run.close)
        server = held.enter_context(
            GrpcServer(
                options.listen,
                [store_service(prepared.store), master_service(master, channels_of(prepared.store))],
                credentials=access.credentials,
                insecure=options.insecure,
                anonymous=access.anonymous,
            )
        )
        _introduce(console, options, prepared, run, server.address)
        job = _Job(options, prepared, master, run, console, command)
        held.enter_context(stopping_on_signals(master.stop, console))
        if local_workers:
            # A certificate names hosts, and 0.0.0.0 is none.
            near = str(Address.parse(server.address).for_this_host())
            workers = LocalWorkers(
                local_workers,
                near,
                options.model_file,
                run.path,
                options.deadline_s,
                options.transport,
                {**split_login(options.store)[1], **access.environment},
            )
            held.enter_context(workers)
            job.workers = workers
        held.enter_context(warming(prepared.store))  # while the workers start, and not when they first ask
        try:
            return job.train(began)
        finally:
            _let_workers_leave(master)


def _let_workers_leave(master: Master) -> None:
    """Serves on for a while, until every worker has heard that the job is over, or why it failed."""
    give_up = time.monotonic() + _LEAVE_WAIT_S
    while master.status().workers and time.monotonic() < give_up:
        time.sleep(0.05)


class _Job:
    """One run: its display, its hooks, its end."""

    def __init__(
        self,
        options: JobOptions,
        prepared: PreparedJob,
        master: Master,
        run: RunDirectory,
        console: Console,
        command: Sequence[str],
    ) -> None:
        self._options = options
        self._command = command
        self._prepared = prepared
        self._master = master
        self._run = run
        self._console = console
        self.workers: LocalWorkers | None = None
        self._checkpoints = options.checkpoint_dir or run.path / "checkpoints"
        self._series = CheckpointSeries(
            self._checkpoints,
            prepared.store,
            keep=options.keep,
            full_every=options.full_every if options.checkpoint_every else 1,
            resumed=prepared.resumed,
        )
        self._writer = CheckpointWriter(prepared.store, self._begin_checkpoint, options.deadline_s)

    def train(self, began: float) -> int:
        """Drives the job to its end; the exit code."""
        job = self._prepared.job
        schedule = Schedule(job)
        begin = self._prepared.progress
        progress = JobProgress(self._console, job.train_records * job.epochs, begin.records)
        model = self._prepared.model
        freezing = Freezing(model, self._prepared.dense)
        given = self._prepared.file.callbacks()
        best = BestVersions(
            given,
            self._prepared.store,
            self._prepared.dense,
            job,
            self._master.progress,
            f"{self._options.checkpoint_dir or self._run.path / 'checkpoints'}/best",
            self._series.rows_changed,
        )
        callbacks = JobCallbacks(given, model, job.epochs, schedule.steps_per_epoch, freezing, best)
        hooks = JobHooks(
            callbacks,
            schedule,
            self._master.stop,
            self._run,
            self._save,
            self._options.checkpoint_every,
            lambda epoch, logs: progress.epoch(epoch, job.epochs, logs),
            progress.evaluation,
            self._series.rows_changed,
            begin.version,
        )
        # Of a job that is resumed: it may have nothing left to do.
        hooks.logs = begin.logs
        watched = watching_store(self._master, self._prepared.store, self._options.deadline_s)
        with progress, closing(self._writer), self._watching(progress), watched:
            callbacks.begin(begin.hooks)
            try:
                status = self._master.run(hooks)
            except Exception as error:
                if (blamed := self._prepared.file.blamed("a callback", error)) is not None:
                    raise blamed from error
                raise
            if self._master.stop_reason not in SIGNAL_REASONS.values():
                # A job that was interrupted goes on with the weights as they are.
                self._writer.wait()
                prepared = self._prepared
                finalize_averages(prepared.dense, prepared.store, prepared.tables, self._series.rows_changed)
            callbacks.end(hooks.logs)
            checkpoint = self._writer.finish(self._prepared.dense.tensors(), self._master.progress())
        self._finish(hooks, checkpoint, status.version, status.records_trained, time.monotonic() - began)
        if self._master.stop_reason not in SIGNAL_REASONS.values():
            return ExitCode.DONE
        if self._command:
            again = shlex.join([*self._command, "--resume", "--checkpoint-dir", str(self._checkpoints)])
            told = f"{self._master.stop_reason} at version {status.version:,}; go on with:\n{again}"
            self._console.print(told, highlight=False, markup=False, soft_wrap=True)
        return ExitCode.INTERRUPTED

    def _save(self) -> None:
        self._writer.begin(self._prepared.dense.tensors(), self._master.progress())

    def _begin_checkpoint(self, rows: Snapshot, dense: Mapping[str, Tensor], progress: Progress) -> Callable[[], str]:
        return self._series.begin(rows, dense, self._prepared.job, progress)

    @contextmanager
    def _watching(self, progress: JobProgress) -> Iterator[None]:
        """Shows the job, and looks after local workers, in a thread beside it."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_EVERY_S):
                progress.show(self._master.status())
                self._look_after_workers()

        watcher = threading.Thread(target=look, name="elastable-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join(timeout=5.0)

    def _look_after_workers(self) -> None:
        if self.workers is None:
            return
        for line in self.workers.newly_dead():
            self._console.print(f"[yellow]{escape(line)}[/yellow]", highlight=False)
        if self._master.stop_reason is not None:
            # They leave as soon as they are told, while the last commit or a callback may still run.
            return
        try:
            self.workers.require_some_alive()
        except ElastableError as error:
            self._master.report_failure("local workers", error, fatal=True)

    def _finish(self, hooks: JobHooks, checkpoint: str, version: int, records: int, total_seconds: float) -> None:
        job = self._prepared.job
        exported = self._export()
        trained = max(0, records - self._prepared.progress.records)
        timed = max(0, trained - hooks.untimed_records)
        seconds = hooks.stopwatch.seconds
        result: dict[str, Any] = {
            "auc": _held_out_auc(hooks.logs),
            "examples": trained,
            "seconds": seconds,
            "timed_examples": timed,
            "examples_per_second": timed / seconds if seconds > 0 else 0.0,
            "total_seconds": total_seconds,
            "version": version,
            "workers": self._master.contributors,
            "store": redacted(self._options.store),
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


def _held_out_auc(logs: Mapping[str, float]) -> float | None:
    """The first AUC of the validation split, whatever its metric is called: "auc", "AUC", "auc_1"."""
    return next((value for name, value in logs.items() if name.lower().startswith("val_auc")), None)


def _introduce(console: Console, options: JobOptions, prepared: PreparedJob, run: RunDirectory, address: str) -> None:
    tables = ", ".join(
        f"{spec.name} [{'any id' if spec.vocabulary_size is None else f'{spec.vocabulary_size:,}'} x {spec.dim}]"
        for spec in prepared.tables.values()
    )
    job = prepared.job
    console.print(
        f"master at {address}, store {redacted(options.store)}, run {run.path}", highlight=False, markup=False
    )
    console.print(f"tables: {tables}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{job.train_records:,} records x {job.epochs} epochs, {job.mode}, micro-batches of {job.micro_batch_size}, "
        f"{job.grads_to_wait} to a version",
        highlight=False,
    )
    if prepared.progress.version:
        console.print(f"resuming at version {prepared.progress.version}", highlight=False)
    (run.path / "job.json").write_text(json.dumps({"address": address, "job": job.job}) + "\n")
