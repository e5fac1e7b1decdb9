"""A job all of whose processes an engine starts: this one shows what the master says, and ends with it."""

import codecs
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import command_words, option_fields
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import byte_count
from elastable.embedding_store.wire.access.credentials import GIVEN_TOKEN, Credentials
from elastable.jobs.engines.engine import Command, Engine, Processes
from elastable.jobs.engines.ray_actors import RayEngine, RoleNeeds, is_local
from elastable.jobs.engines.roles import StoreAccess, start_stores, start_workers, store_options
from elastable.jobs.options import JobOptions, TrainOptions, resume_command
from elastable.process.exit_codes import ExitCode
from elastable.process.stopping import OUTPUT_CLOSED, OutputConsole, stopping_on_signals

_MASTER_LEAVE_S, _MASTER_END_S = 30.0, 30.0
_FIRST_LOOKS_S, _LOOK_EVERY_S = 0.2, 0.5  # until the workers know their master, and from then on
_PASSED_ON = ("ELASTABLE_", "KERAS_", "OTEL_", "TF_", "JAX_", "XLA_")


def run_on(options: TrainOptions, console: Console, environment: Mapping[str, str] | None = None) -> int:
    """Trains as the options say, on the engine that they name; the exit code.

    Args:
        environment: Variables of its processes besides those that are passed on.

    Raises:
        ElastableError: the engine cannot be used, or what it started ended for good before the job.
    """
    assert options.on is not None
    files = (options.working_dir or options.model_file.parent).resolve()
    model = options.model_file.resolve()
    if not model.is_relative_to(files):
        raise BadInput(f"--working-dir {files}: {model} is not in it, and is to be copied with it")
    runs = options.run_dir.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=runs))
    least, most = options.worker_range
    memory = 0 if options.memory is None else byte_count(options.memory)
    parts = {
        "master": RoleNeeds(1, 1),
        "store": RoleNeeds(options.local_stores, options.local_stores, memory=memory),
        "worker": RoleNeeds(least, most, options.worker_cpus, options.worker_gpus, memory),
    }
    left_out = [str(runs.relative_to(files))] if runs.is_relative_to(files) else []
    placed = _placed(options, is_local(options.on), model.relative_to(files), home)
    with RayEngine(options.on, parts, files, left_out, home, options.deadline_s) as engine:
        return _JobOnEngine(engine, placed, console, environment or {}).run()


def _placed(options: TrainOptions, here: bool, model: Path, home: Path) -> TrainOptions:
    """The options as the processes have them, wherever they are: paths from the root, and an address to listen on."""
    where = Address.parse(options.listen)
    if not here and where.is_loopback:
        where = replace(where, host="0.0.0.0")
    Credentials.from_environment().for_server(where, options.insecure)
    started = replace(options, resume_command=resume_command(options, options.checkpoint_dir or home / "checkpoints"))
    paths: dict[str, Any] = {
        name: _from_root(value)
        for name in ("locations", "warm_start", "checkpoint_dir", "run_dir", "profile")
        if (value := getattr(options, name)) is not None
    }
    paths.setdefault("checkpoint_dir", home / "checkpoints")
    return replace(started, model_file=model, listen=str(where), **paths)


def _from_root(path: str | Path) -> str | Path:
    return path if "://" in str(path) else Path(path).resolve()


class _JobOnEngine:
    """Starts the processes of a job, and looks after them until its master has ended."""

    def __init__(self, engine: Engine, options: TrainOptions, console: Console, environment: Mapping[str, str]) -> None:
        self._engine, self._options, self._console, self._environment = engine, options, console, environment
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown = 0
        self._reason: str | None = None
        self._interrupted = 0  # the process that knows of it
        self._told: dict[str, Sequence[str]] = {}

    def run(self) -> int:
        """The exit code of the job."""
        options = self._options
        servers, workers = self._environments()
        with ExitStack() as held:
            stores = None
            if options.local_stores:
                of_each = store_options(options, str(replace(Address.parse(options.listen), port=0)))
                stores = held.enter_context(start_stores(self._engine, options.local_stores, of_each, servers))
            started = self._engine.start("master", [self._command(servers)], _MASTER_LEAVE_S, _MASTER_END_S)
            master = held.enter_context(started)
            held.enter_context(stopping_on_signals(self._stop, self._console))
            others = [] if stores is None else [stores]
            others.append(held.enter_context(start_workers(self._engine, options, workers)))
            return self._until_the_end(master, stores, others)

    def _environments(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Variables of master and store servers, and of workers; with secrets of this run, where these may travel."""
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        same = {**passed_on, **self._environment}
        if self._console.is_terminal:  # what the master writes is shown there
            same |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(self._console.width)}
        in_the_clear = not Address.parse(self._options.listen).is_loopback
        elsewhere = self._options.stores and not self._options.local_stores  # servers that know nothing of this run
        if elsewhere or (in_the_clear and Credentials.from_environment().certificate is None):
            return same, same
        servers = {**same, **StoreAccess.for_run().servers}
        of_workers = {name: value for name, value in servers.items() if not value or name in same}
        return servers, {**of_workers, GIVEN_TOKEN: servers[GIVEN_TOKEN]}

    def _command(self, environment: Mapping[str, str]) -> Command:
        """Of the master, which goes on where it was when it is started again."""
        options = self._options
        known = option_fields(JobOptions)
        left_out = {name for name in option_fields(TrainOptions) if name not in known} | {"listen"}
        if options.local_stores:
            left_out |= {"store", "stores"}
        on_again = replace(options, resume=True, rerun=False, overwrite=False, take_over=False)
        words, again = (["master", *command_words(of, left_out | {"workers"})] for of in (options, on_again))
        more = ["--listen", options.listen, "--workers", str(options.worker_range[1])]
        peers = {"--stores": "store"} if options.local_stores else {}
        return Command([*words, *more], [*again, *more], peers, {"PYTHONUNBUFFERED": "1", **environment})

    def _stop(self, reason: str) -> None:
        self._reason = reason

    def _until_the_end(self, master: Processes, stores: Processes | None, others: Sequence[Processes]) -> int:
        while True:
            (seen,) = master.look()
            self._show(master.logs[0])
            if seen.code is not None:
                break
            if self._reason is not None and seen.address and seen.pid != self._interrupted:
                self._interrupted = seen.pid
                master.interrupt()
            if stores is not None:
                self._tell("store", [it.address or "" for it in stores.look()], [master])
            self._tell("master", [seen.address or ""], others)
            for each in others:
                for line in each.newly_dead():
                    self._console.print(f"[yellow]{escape(line)}[/yellow]", highlight=False)
            if self._reason is None and not any(it.code == ExitCode.DONE for it in others[-1].look()):
                others[-1].require_some_alive()  # one that is done knows that the job is, too
            time.sleep(_LOOK_EVERY_S if "master" in self._told else _FIRST_LOOKS_S)
        if seen.code == ExitCode.INTERRUPTED and self._reason == OUTPUT_CLOSED:
            return ExitCode.OUTPUT_CLOSED
        return seen.code if seen.code >= 0 else ExitCode.JOB_FAILED

    def _tell(self, role: str, addresses: Sequence[str], to: Sequence[Processes]) -> None:
        """Passes on where all servers of a role are, once they are somewhere."""
        if all(addresses) and addresses != self._told.get(role):
            self._told[role] = addresses
            for each in to:
                each.tell(role, addresses)

    def _show(self, log: Path) -> None:
        """Writes on standard output what the master has written since the last call."""
        with log.open("rb") as written:
            written.seek(self._shown)
            new = written.read()
        self._shown += len(new)
        if new and not self._console.quiet:
            try:
                self._console.file.write(self._decoder.decode(new))
                self._console.file.flush()
            except BrokenPipeError:
                if isinstance(self._console, OutputConsole):
                    self._console.on_broken_pipe()
