"""The settings of the commands that train and serve: help, default, bounds and name of each, defined once."""

# ruff: noqa: RUF009 - these calls make fields

import re
import shlex
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.open_store import check_store_url
from elastable.embedding_store.option import Option, check_options, command_words, option_fields, required, setting
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import (
    STRATEGIES,
    byte_count,
    outlives_process,
    refuse_remote_shards,
)
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.wire.server.call_room import CallLimits
from elastable.jobs.servers.finding import Peers
from elastable.master.api import KNOWN_VALUES
from elastable.master.master_options import Until

_MOST_LOCAL_STORES = 64
_WORKERS = re.compile(r"(\d{1,5})(?::(\d{1,5}))?")
_OF_ENGINES = ("working_dir", "worker_cpus", "worker_gpus", "memory")

T = TypeVar("T")


def _grouped(group: str, default: T, help: str, **more: Any) -> T:  # noqa: A002 - as `Option` calls it
    return setting(default, Option(help, group=group, **more))


_of_job = partial(_grouped, "The job")
_of_model = partial(_grouped, "Data and model")
_of_store = partial(_grouped, "Store and locations")
_of_saving = partial(_grouped, "Checkpoints and output")
_of_workers = partial(_grouped, "Slow workers")
_of_network = partial(_grouped, "Network")
_of_engine = partial(_grouped, "Cluster")

_network = partial(Option, group="Network")

MODEL_FILE = Option("Model file: defines model() and data(split).", metavar="MODEL.py", positional=True)
OFFLOAD_ABOVE = Option(
    "Move each plain keras.layers.Embedding of more elements to the store; 0: none.",
    flags=("--offload-embeddings-above",), at_least=0, metavar="ELEMENTS",
)  # fmt: skip
_STORE_URL = Option(
    "memory, file:///folder, or redis://[user:pass@]host:port (rediss:// for TLS); docs/stores.md says more.",
    group="Store and locations", metavar="URL",
)  # fmt: skip
_NOT_FINITE = Option(
    "What to do with gradients that hold NaN or Inf.", group="The job", choices=KNOWN_VALUES["not_finite"]
)
_LISTEN = _network("Address to listen on; port 0 takes a free one.", metavar="HOST:PORT")
_HTTP = _network(
    "Serve metrics, health and a live page over HTTP at this address; port 0 takes a free one.",
    metavar="HOST:PORT", unset="off",
)  # fmt: skip
_TRANSPORT = _network(
    "How processes on this host read rows: auto takes the server's shared memory where that is possible, else gRPC.",
    choices=("auto", "grpc", "shared"),
)
_PROFILE = Option(
    "Write a profile of ten micro-batches of a worker to this folder, for TensorBoard.",
    group="Slow workers", metavar="DIR", unset="none",
)  # fmt: skip


def deadline(meaning: str) -> Option:
    return _network(meaning, flags=("--deadline",), above=0, metavar="SECONDS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningOptions:
    """What the commands that others call have in common.

    Raises:
        BadInput: a value that is not allowed.
    """

    transport: str = setting("auto", _TRANSPORT)
    insecure: bool = _of_network(
        False, "Listen beyond this host without TLS or a token: whoever reaches the port may use everything it serves."
    )
    listen: str = setting("127.0.0.1:50051", _LISTEN)
    http: str | None = setting(None, _HTTP)
    client_calls: int = _of_network(
        128,
        "Calls of one client (a connection) under way or waiting at this server; a client retries further calls later.",
        at_least=16, metavar="N",
    )  # fmt: skip
    client_bytes: str | None = _of_network(
        None,
        "Bytes of requests of one client that this server receives at once; a client retries further requests later.",
        metavar="SIZE", unset="a sixteenth of the memory, at least 512 MiB",
    )  # fmt: skip
    client_rate: int | None = _of_network(
        None, "Calls a second that one client may make at this server; a client retries further calls later.",
        at_least=10, metavar="N", unset="no limit",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.limits.upload_bytes_of_a_client == 0:
            raise BadInput(f"--client-bytes {self.client_bytes}: must be above 0")
        _check_addresses(listen=self.listen, http=self.http)

    @property
    def limits(self) -> CallLimits:
        """What one client may do at the server."""
        most = None if self.client_bytes is None else byte_count(self.client_bytes)
        return CallLimits(
            calls_of_a_client=self.client_calls,
            calls_a_second_of_a_client=self.client_rate,
            upload_bytes_of_a_client=most,
        )


@dataclass(frozen=True, slots=True)
class JobOptions(ListeningOptions):
    """Settings of `elastable master`, and of a job that is prepared in this process.

    Raises:
        BadInput: a value that is not allowed, or two that contradict each other.
    """

    model_file: Path = required(MODEL_FILE)
    mode: str = _of_job(
        "sync",
        "sync gives the same numbers for any number of workers; async never waits.",
        choices=KNOWN_VALUES["mode"],
    )
    epochs: int | None = _of_job(
        None, "Passes over the training data; of a stream of events, epochs as its reader says.", at_least=1,
        unset="1; a stream has no end",
    )  # fmt: skip
    micro_batch_size: int = _of_job(256, "Records in a micro-batch, the unit of work of a worker.", at_least=1)
    grads_to_wait: int | None = _of_job(
        None, "Micro-batches of one update.", at_least=1,
        unset="the optimizer's gradient_accumulation_steps; else --workers in sync mode, or 1",
    )  # fmt: skip
    average: str = _of_job(
        "mean",
        "How micro-batches are combined: mean divides as Keras divides the loss of one batch; records weighs each by "
        "its records; batches weighs all the same; sum adds them.",
        choices=KNOWN_VALUES["average"],
    )
    not_finite: str = setting("refuse", _NOT_FINITE)
    seed: int = _of_job(0, "Seed of record order, initial values and dropout.")
    intra_op_threads: int = _of_job(
        1, "Threads of an operation on every worker; part of the job, since it changes roundings.", at_least=1
    )
    evaluate_every: int = _of_job(
        0, "Evaluate every N versions during training; 0: only at the end of epochs.", at_least=0, metavar="VERSIONS"
    )
    linger_s: float = _of_model(
        5.0, "Of a stream of events: train events that are too few for a version after so long.",
        flags=("--linger",), at_least=0, metavar="SECONDS",
    )  # fmt: skip
    until: str | None = _of_model(
        None, "Where a stream of events ends for this job: where it ends now, before a time, or at positions.",
        metavar="end|TIME|PARTITION=POSITION,...", unset="it does not",
    )  # fmt: skip
    max_bad_events: int = _of_model(
        100, "Stop if more events of a stream than these cannot be read.", at_least=0, metavar="N"
    )
    shuffle: bool = _of_model(True, "Shuffle the training records.")
    lazy: bool = _of_model(
        True,
        "A step moves only the rows that its batch touches; --no-lazy moves all rows, as plain Keras does "
        "(docs/fit.md).",
    )
    offload_above: int = setting(0, replace(OFFLOAD_ABOVE, group="Data and model"))
    store: str = setting("memory", _STORE_URL)
    stores: tuple[str, ...] = _of_store(
        (),
        "Store servers that hold the rows, a shard each (elastable store); with elastable train, a number starts so "
        "many here, each with a part of --store.",
        metavar="HOST:PORT[,...]|dns://...|file://...|redis://...|N", unset="rows are with the master",
    )  # fmt: skip
    partition: str = _of_store(
        "token", "How tables are split over --stores: token (by id) or encoding (by column).", choices=STRATEGIES
    )
    locations: Path | None = _of_store(
        None, "Which table is kept where; see elastable plan.", metavar="FILE.toml", unset="all in --store"
    )
    warm_start: str | Path | None = _of_store(
        None, "Start with rows of another model's checkpoint, in the tables that both have.", metavar="CKPT"
    )
    warm_tables: tuple[str, ...] = _of_store(
        (), "Take only these tables from --warm-start.", metavar="A,B", unset="all that both models have"
    )
    continue_from: str | Path | None = _of_store(
        None,
        "Begin as another job ended, on new data: rows, optimizer state, step and counts. --store itself, where its "
        "rows are.",
        metavar="RUN|CKPT|URL",
    )
    leave_out: tuple[str, ...] = _of_store(
        (), "Tables and variables of --continue-from that the model no longer has.", metavar="A,B", unset="none"
    )
    overwrite: bool = _of_store(
        False,
        "Drop an earlier job's tables from the store; write next to another job's checkpoints in --checkpoint-dir.",
    )
    take_over: bool = _of_store(False, "Take the store from a job that still runs on it; that job fails.")
    run_dir: Path = _of_saving(Path("runs"), "Directory for run directories.", metavar="DIR")
    checkpoint_dir: str | Path | None = _of_saving(
        None, "Directory for checkpoints, a path or a URL such as s3://bucket/folder.",
        metavar="DIR|URL", unset="in the run directory",
    )  # fmt: skip
    checkpoint_every: int = _of_saving(
        0, "Write a checkpoint every N versions; 0: only at the end.", at_least=0, metavar="VERSIONS"
    )
    keep: int = _of_saving(3, "Checkpoints to keep; 0: all.", at_least=0)
    full_every: int = _of_saving(
        5, "Write a full checkpoint every N; those between hold only what changed.", at_least=1, metavar="CHECKPOINTS"
    )
    resume: bool = _of_saving(
        False, "Continue an earlier job, in Redis or from the newest checkpoint; start anew if there is none."
    )
    rerun: bool = _of_saving(False, "With --resume: train again if the earlier job has finished.")
    export: bool = _of_saving(True, "Write the trained model as plain .keras.")
    lease_s: float = _of_workers(
        60.0, "Seconds before an unfinished micro-batch is reassigned.", flags=("--lease",), above=0, metavar="SECONDS"
    )
    backup_after_s: float | None = _of_workers(
        None, "Seconds before an idle worker also computes a slow worker's micro-batch; the first result counts.",
        flags=("--backup-after",), above=0, metavar="SECONDS", unset="never",
    )  # fmt: skip
    staleness_bound: int | None = _of_workers(
        None, "With --mode async: compute a gradient again if it is more versions behind than this.",
        at_least=0, metavar="VERSIONS", unset="no bound",
    )  # fmt: skip
    staleness_modulation: str = _of_workers(
        "none",
        "With --mode async: inverse divides the learning rate by 1 + the versions that a gradient is behind.",
        choices=KNOWN_VALUES["staleness_modulation"],
    )
    deadline_s: float = setting(60.0, deadline("How long a worker or the store may be unreachable."))
    workers: str | int = _of_job(
        "0", "Workers that are expected, of which --grads-to-wait is the default.", metavar="N"
    )
    resume_command: str | None = _of_saving(
        None, "What to type to resume the job, for the last line of one that is interrupted.",
        metavar="COMMAND", unset="this command, with --resume",
    )  # fmt: skip
    # Where the first of the workers that the command starts itself writes a profile: of `TrainOptions` alone.
    profile: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        ListeningOptions.__post_init__(self)
        object.__setattr__(self, "workers", str(self.workers))  # a settings file has a number
        self.worker_range  # noqa: B018 - which checks it
        Until.parse(self.until)
        if self.warm_tables and self.warm_start is None:
            raise BadInput("--warm-tables needs --warm-start: the checkpoint to take the rows from")
        if self.leave_out and self.continue_from is None:
            raise BadInput("--leave-out needs --continue-from: the job whose tables and variables are left out")
        if self.continue_from is not None and self.warm_start is not None:
            raise BadInput(
                "--continue-from and --warm-start: the first takes all that a job left, and counts on from its last "
                "version; the second takes rows alone, for version 0 of another model: give one of them"
            )
        self._check_stores()
        if self.rerun and not self.resume:
            raise BadInput("--rerun needs --resume: it says what --resume does if the earlier job has finished")
        servers_elsewhere = bool(self.stores) and not self.local_stores
        if self.resume and self.checkpoint_dir is None and not servers_elsewhere and not outlives_process(self.store):
            raise BadInput(
                "--resume needs --checkpoint-dir: the directory to resume from; or a store that outlives the job: "
                "redis://, file:///folder, or memory?log=/folder"
            )

    def _check_stores(self) -> None:
        check_store_url(self.store)
        if not self.stores:
            refuse_remote_shards(self.store)
            if self.partition != "token":
                raise BadInput("--partition needs --stores: rows with the master are split by --store encoding:URL,URL")
            return
        if self.local_stores:
            _require_own_store(self.store)
            return
        if self.store != "memory":
            raise BadInput(
                f"--store {redacted(self.store)} with --stores: each store server elsewhere has its own --store"
            )
        if (peers := Peers.parse("--stores", ",".join(self.stores))).name is not None and peers.count is None:
            raise BadInput(
                f"--stores {peers.text}: write dns://name:port?count=N: while servers start, a name has fewer "
                "addresses than there will be"
            )

    @property
    def continues_in_place(self) -> bool:
        """Whether the job that `continue_from` names left its rows in the job's own store."""
        return self.continue_from is not None and str(self.continue_from) in (self.store, ",".join(self.stores))

    @property
    def local_stores(self) -> int:
        """Store servers that the command starts itself, as it does workers."""
        if not self.own_workers or len(self.stores) != 1 or not self.stores[0].isdecimal():
            return 0
        if not 1 <= int(self.stores[0]) <= _MOST_LOCAL_STORES:
            raise BadInput(f"--stores {self.stores[0]}: from 1 to {_MOST_LOCAL_STORES} store servers are started here")
        return int(self.stores[0])

    @property
    def worker_range(self) -> tuple[int, int]:
        """The least and the most workers that are expected.

        Raises:
            BadInput: `workers` says no such thing.
        """
        found = _WORKERS.fullmatch(str(self.workers))
        least, most = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, -1)
        if not least <= most or (found is not None and found[2] and not least):
            raise BadInput(f"--workers {self.workers}: write a number, or the least and the most, as in 2:8")
        return least, most

    @property
    def own_workers(self) -> int:
        """Workers that the command starts itself."""
        return 0

    @property
    def works_here(self) -> bool:
        """Whether the only worker of the command works in the master's process and thread."""
        return False

    @property
    def default_grads_to_wait(self) -> int:
        """Micro-batches of one update where neither `grads_to_wait` nor the optimizer sets them."""
        return max(1, self.worker_range[1]) if self.mode == "sync" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(JobOptions):
    """Settings of `elastable train`."""

    workers: str | int = _of_job(
        "2",
        "Workers to start; 1 works in this process. With --on also the least and the most, of which the cluster runs "
        "what it has room for.",
        metavar="N|LEAST:MOST",
    )  # fmt: skip
    profile: Path | None = setting(None, _PROFILE)
    listen: str = setting("127.0.0.1:0", _LISTEN)
    on: str | None = _of_engine(
        None,
        "Where its processes run: ray (one that RAY_ADDRESS names, or else is started here), or a Ray cluster.",
        metavar="ray|ray://HOST:PORT", unset="this machine",
    )  # fmt: skip
    working_dir: Path | None = _of_engine(
        None, "With --on: the folder that every node gets a copy of, with MODEL.py in it; the current one there.",
        metavar="DIR", unset="MODEL.py's",
    )  # fmt: skip
    worker_cpus: float = _of_engine(
        1.0, "With --on: CPUs of each worker; master and store servers have one each.", above=0
    )
    worker_gpus: float = _of_engine(0.0, "With --on: GPUs of each worker.", at_least=0)
    memory: str | None = _of_engine(
        None, "With --on: memory that each worker and store server asks for.", metavar="SIZE", unset="asks for none"
    )

    def __post_init__(self) -> None:
        JobOptions.__post_init__(self)
        least, most = self.worker_range
        if not least:
            raise BadInput(f"--workers {self.workers}: must be at least 1")
        if self.on is None:
            given = [name for name in _OF_ENGINES if getattr(self, name) != option_fields(TrainOptions)[name].default]
            if least != most or given:
                named = f"--workers {self.workers}" if least != most else f"--{given[0].replace('_', '-')}"
                raise BadInput(f"{named} is for a cluster: name it with --on, as in --on ray")
        elif self.on != "ray":
            scheme, _, address = self.on.partition("://")
            if scheme != "ray":
                raise BadInput(f"--on {self.on}: write --on ray, or --on ray://HOST:PORT")
            _check_addresses(on=address)
        if self.memory is not None:
            byte_count(self.memory)

    @property
    def own_workers(self) -> int:
        return self.worker_range[1]

    @property
    def works_here(self) -> bool:
        return self.on is None and self.own_workers == 1


_STARTING_POINT = ("resume", "rerun", "overwrite", "take_over", "checkpoint_dir", "continue_from", "leave_out")


def resume_command(options: JobOptions, checkpoints: str | Path) -> str:
    """What to type to go on with a job where it ended, from its newest checkpoint."""
    if options.resume_command is not None:
        return options.resume_command
    shown = replace(options, store=redacted(options.store))
    command = "train" if isinstance(shown, TrainOptions) else "master"
    words = ["elastable", command, *command_words(shown, leave_out=_STARTING_POINT)]
    return shlex.join([*words, "--resume", "--checkpoint-dir", str(checkpoints)])


MODEL_SOURCE = Option(
    "A run directory, a checkpoint, or a store: redis://..., memory?log=/folder, grpc://MASTER, servers:HOST:PORT,...",
    metavar="RUN|DIR|URL", positional=True,
)  # fmt: skip
OWN_CLASSES = Option(
    "The job's model file, for a model of classes and functions of your own.", metavar="MODEL.py",
    unset="the model as the version describes it",
)  # fmt: skip
EARLIER_VERSIONS = Option(
    "Where earlier versions of a store are.", metavar="DIR|URL", unset="nowhere; of a run its own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServerOptions:
    """Settings of `elastable serve-model`.

    Raises:
        BadInput: a value that is not allowed; or it is to follow what does not change.
    """

    source: str = required(MODEL_SOURCE)
    model_file: Path | None = setting(None, OWN_CLASSES)
    follow: bool = setting(
        False,
        Option("Go on to every version that the job commits, or saves in its run.", flags=("--follow",)),
    )
    version: int | None = setting(
        None, Option("The version to hold, until `elastable hold` says otherwise.", at_least=0, unset="the newest one")
    )
    checkpoints: str | None = setting(None, EARLIER_VERSIONS)
    unknown_ids: str = setting(
        "initial", Option("What ids without a row read: their initial value, or zeros.", choices=("initial", "zeros"))
    )
    http: str = setting(
        "127.0.0.1:8501", _network("Address to answer at; port 0 takes a free one.", metavar="HOST:PORT")
    )
    grpc: str | None = setting(
        None,
        _network("Address to answer at over gRPC; port 0 takes a free one.", metavar="HOST:PORT", unset="HTTP alone"),
    )
    insecure: bool = setting(False, _network("Serve others than this host without TLS and tokens."))
    batch_records: int = setting(
        512,
        Option(
            "Records of waiting requests that are predicted together; 1: each request by itself.", at_least=1,
            metavar="N",
        ),
    )  # fmt: skip
    drain_s: float = setting(
        0.0,
        Option(
            "How long a stopped server says that it is not ready before it takes no more requests.",
            flags=("--drain",), at_least=0, metavar="SECONDS",
        ),
    )  # fmt: skip
    deadline_s: float = setting(10.0, deadline("How long reading the store may take."))

    def __post_init__(self) -> None:
        check_options(self)
        _check_addresses(http=self.http, grpc=self.grpc)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings of `elastable worker`.

    Raises:
        BadInput: a value that is not allowed; or no file is named and the master is not trusted to name one.
    """

    master: str = required(
        Option(
            "Address of the master; several, a DNS name or a file of addresses if it may restart at another one.",
            metavar="HOST:PORT[,...]|dns://...|file://...",
        )
    )
    model: Path | None = setting(
        None, Option("The master's model file, on this machine.", metavar="MODEL.py", positional=True)
    )
    trust_master: bool = setting(
        False,
        Option("Run whatever file of this machine the master names: it gives the master control of this account."),
    )
    deadline_s: float = setting(60.0, deadline("How long the master or the store may be unreachable."))
    transport: str = setting("auto", _TRANSPORT)
    profile: Path | None = setting(None, _PROFILE)
    insecure: bool = setting(False, _network("With --http: serve others than this host without TLS and tokens."))
    http: str | None = setting(None, _HTTP)

    def __post_init__(self) -> None:
        check_options(self)
        _check_addresses(http=self.http)
        Peers.parse("--master", self.master)
        if self.model is None and not self.trust_master:
            raise BadInput(
                "no model file is named: write `elastable worker MODEL.py --master HOST:PORT` with the master's own "
                "file. --trust-master runs whatever file of this machine the master names, and so gives the master, "
                "and whoever answers at its address, this account"
            )


@dataclass(frozen=True, slots=True)
class ServingOptions(ListeningOptions):
    """What `elastable serve` and `elastable store` have in common."""

    store: str = setting("memory", _STORE_URL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(ServingOptions):
    """Settings of `elastable serve`."""

    not_finite: str = setting("refuse", _NOT_FINITE)
    deadline_s: float = setting(60.0, deadline("How long a commit is retried while the store fails."))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreServerOptions(ServingOptions):
    """Settings of `elastable store`; `BadInput` also for a store that is split over several places."""

    gradient_bytes: str = _of_store(
        "1GiB", "Memory for gradients of the version in work; workers wait where there is no room.", metavar="SIZE"
    )
    register: str | None = _of_store(
        None, "Announce this server in a Redis, under a number: it keeps its rows in store-NUMBER of --store.",
        metavar="URL", unset="masters name its address",
    )  # fmt: skip
    number: int | None = _of_store(
        None, "Number of this server, from 0, with --register.", at_least=0,
        unset="the one that this host had last, else the lowest that is free",
    )  # fmt: skip
    listen: str = setting("127.0.0.1:50061", _LISTEN)
    advertise: str | None = setting(
        None,
        _network(
            "Where masters and workers call this server, with --register.", metavar="HOST:PORT",
            unset="--listen, or this host's name and the port",
        ),
    )  # fmt: skip

    def __post_init__(self) -> None:
        ListeningOptions.__post_init__(self)
        byte_count(self.gradient_bytes)
        _require_own_store(self.store)
        if self.register is None and (self.number is not None or self.advertise is not None):
            raise BadInput("--number and --advertise need --register: the Redis in which the server is announced")


def _check_addresses(**addresses: str | None) -> None:
    """Raises `BadInput` for an address to listen on that is none, by its option."""
    for option, address in addresses.items():
        try:
            if address is not None:
                Address.parse(address)
        except BadInput as error:
            raise BadInput(f"--{option}: {error}") from error


def _require_own_store(url: str) -> None:
    """Raises `BadInput` unless a store server can keep its rows in the store at this URL."""
    if not re.match(r"memory($|\?)|file:|rediss?(\+sentinel)?:", url):
        raise BadInput(
            f"--store {redacted(url)}: a store server keeps its own rows: write memory, memory?log=/folder, "
            "file:///folder or redis://host:port"
        )
