"""The settings of the commands that train and serve: help, default, bounds and name of each, defined once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.open_store import check_store_url
from elastable.embedding_store.option import Option, check_options, required, setting
from elastable.embedding_store.support.store_url import outlives_process, refuse_remote_shards
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.jobs.servers.server_options import require_own_store, require_servers
from elastable.jobs.shared_options import (
    CLIENT_BYTES,
    CLIENT_CALLS,
    CLIENT_RATE,
    HTTP,
    INSECURE,
    LISTEN,
    NOT_FINITE,
    OFFLOAD_ABOVE,
    PROFILE,
    STORE_URL,
    TRANSPORT,
    check_addresses,
    client_limits,
    deadline,
    of_job,
    of_model,
    of_network,
    of_saving,
    of_store,
    of_workers,
)
from elastable.master.api import KNOWN_VALUES

__all__ = [
    "MODEL_FILE",
    "MOST_LOCAL_STORES",
    "JobOptions",
    "TrainOptions",
    "WorkerOptions",
]

MOST_LOCAL_STORES = 64

MODEL_FILE = Option("Model file: defines model() and data(split).", metavar="MODEL.py", positional=True)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Settings of `elastable master`, and of a job that is prepared in this process.

    Raises:
        BadInput: a value that is not allowed, or two that contradict each other.
    """

    model_file: Path = required(MODEL_FILE)
    mode: str = setting(
        "sync",
        of_job(
            "sync gives the same numbers for any number of workers; async never waits.", choices=KNOWN_VALUES["mode"]
        ),
    )
    epochs: int = setting(1, of_job("Passes over the training data.", at_least=1))
    micro_batch_size: int = setting(
        256,
        of_job("Records in a micro-batch, the unit of work of a worker.", at_least=1),
    )
    grads_to_wait: int | None = setting(
        None,
        of_job(
            "Micro-batches of one update.",
            at_least=1, unset="the optimizer's gradient_accumulation_steps; else --workers in sync mode, or 1",
        ),
    )  # fmt: skip
    average: str = setting(
        "mean",
        of_job(
            "How micro-batches are combined: mean divides as Keras divides the loss of one batch; records weighs each "
            "by its records; batches weighs all the same; sum adds them.",
            choices=KNOWN_VALUES["average"],
        ),
    )
    not_finite: str = setting("refuse", NOT_FINITE)
    seed: int = setting(0, of_job("Seed of record order, initial values and dropout."))
    intra_op_threads: int = setting(
        1, of_job("TensorFlow threads of every worker; part of the job, since it changes roundings.", at_least=1)
    )
    evaluate_every: int = setting(
        0,
        of_job(
            "Evaluate every N versions during training; 0: only at the end of epochs.", at_least=0, metavar="VERSIONS"
        ),
    )
    shuffle: bool = setting(True, of_model("Shuffle the training records."))
    lazy: bool = setting(
        True,
        of_model(
            "A step moves only the rows that its batch touches; --no-lazy moves all rows, as plain Keras does "
            "(docs/lazy.md)."
        ),
    )
    offload_above: int = setting(0, OFFLOAD_ABOVE)
    store: str = setting("memory", STORE_URL)
    stores: tuple[str, ...] = setting(
        (),
        of_store(
            "Store servers that hold the rows, a shard each (elastable store); with elastable train, a number starts "
            "so many here, each with a part of --store.",
            metavar="HOST:PORT[,...]|redis://...|dns://...|N", unset="rows are with the master",
        ),
    )  # fmt: skip
    locations: Path | None = setting(
        None, of_store("Which table is kept where; see elastable plan.", metavar="FILE.toml", unset="all in --store")
    )
    warm_start: str | Path | None = setting(
        None, of_store("Start with rows of another model's checkpoint, in the tables that both have.", metavar="CKPT")
    )
    warm_tables: tuple[str, ...] = setting(
        (), of_store("Take only these tables from --warm-start.", metavar="A,B", unset="all that both models have")
    )
    overwrite: bool = setting(
        False,
        of_store(
            "Drop the tables of an earlier job from the store; write beside another job's checkpoints in "
            "--checkpoint-dir."
        ),
    )
    take_over: bool = setting(False, of_store("Take the store from a job that still runs on it; that job fails."))
    run_dir: Path = setting(Path("runs"), of_saving("Directory for run directories.", metavar="DIR"))
    checkpoint_dir: str | Path | None = setting(
        None,
        of_saving(
            "Directory for checkpoints, a path or a URL such as s3://bucket/folder.",
            metavar="DIR|URL", unset="in the run directory",
        ),
    )  # fmt: skip
    checkpoint_every: int = setting(
        0, of_saving("Write a checkpoint every N versions; 0: only at the end.", at_least=0, metavar="VERSIONS")
    )
    keep: int = setting(3, of_saving("Checkpoints to keep; 0: all.", at_least=0))
    full_every: int = setting(
        5,
        of_saving(
            "Write a full checkpoint every N; those between hold only what changed.",
            at_least=1, metavar="CHECKPOINTS",
        ),
    )  # fmt: skip
    resume: bool = setting(
        False,
        of_saving("Continue an earlier job, in Redis or from the newest checkpoint; start anew if there is none."),
    )
    rerun: bool = setting(False, of_saving("With --resume: train again if the earlier job has finished."))
    export: bool = setting(True, of_saving("Write the trained model as plain .keras."))
    lease_s: float = setting(
        60.0,
        of_workers(
            "Seconds before an unfinished micro-batch is reassigned.", flags=("--lease",), above=0, metavar="SECONDS"
        ),
    )
    backup_after_s: float | None = setting(
        None,
        of_workers(
            "Seconds before an idle worker also computes a slow worker's micro-batch; the first result counts.",
            flags=("--backup-after",), above=0, metavar="SECONDS", unset="never",
        ),
    )  # fmt: skip
    staleness_bound: int | None = setting(
        None,
        of_workers(
            "With --mode async: compute a gradient again if it is more versions behind than this.",
            at_least=0, metavar="VERSIONS", unset="no bound",
        ),
    )  # fmt: skip
    staleness_modulation: str = setting(
        "none",
        of_workers(
            "With --mode async: inverse divides the learning rate by 1 + the versions that a gradient is behind.",
            choices=KNOWN_VALUES["staleness_modulation"],
        ),
    )
    deadline_s: float = setting(60.0, deadline("How long a worker or the store may be unreachable."))
    transport: str = setting("auto", TRANSPORT)
    insecure: bool = setting(False, INSECURE)
    listen: str = setting("127.0.0.1:50051", LISTEN)
    http: str | None = setting(None, HTTP)
    client_calls: int = setting(128, CLIENT_CALLS)
    client_bytes: str | None = setting(None, CLIENT_BYTES)
    client_rate: int | None = setting(None, CLIENT_RATE)

    def __post_init__(self) -> None:
        check_options(self)
        client_limits(self.client_calls, self.client_bytes, self.client_rate)
        check_addresses(listen=self.listen, http=self.http)
        if self.warm_tables and self.warm_start is None:
            raise BadInput("--warm-tables needs --warm-start: the checkpoint to take the rows from")
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
            return
        if self.local_stores:
            require_own_store(self.store)
            return
        if self.store != "memory":
            raise BadInput(
                f"--store {redacted(self.store)} with --stores: each store server elsewhere has its own --store"
            )
        require_servers(self.stores)

    @property
    def local_stores(self) -> int:
        """Store servers that the command starts itself."""
        return 0

    @property
    def local_workers(self) -> int:
        """Worker processes that the command starts itself."""
        return 0

    @property
    def local_profile(self) -> Path | None:
        """Where the first of them writes a profile."""
        return None

    @property
    def default_grads_to_wait(self) -> int:
        """Micro-batches of one update where neither `grads_to_wait` nor the optimizer sets them."""
        return max(1, self.local_workers) if self.mode == "sync" else 1


@dataclass(frozen=True, slots=True)
class TrainOptions(JobOptions):
    """Settings of `elastable train`."""

    workers: int = setting(2, of_job("Worker processes to start on this machine.", at_least=1))
    profile: Path | None = setting(None, PROFILE)
    listen: str = setting("127.0.0.1:0", LISTEN)

    @property
    def local_workers(self) -> int:
        return self.workers

    @property
    def local_profile(self) -> Path | None:
        return self.profile

    @property
    def local_stores(self) -> int:
        if len(self.stores) != 1 or not self.stores[0].isdecimal():
            return 0
        if not 1 <= int(self.stores[0]) <= MOST_LOCAL_STORES:
            raise BadInput(f"--stores {self.stores[0]}: from 1 to {MOST_LOCAL_STORES} store servers are started here")
        return int(self.stores[0])


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings of `elastable worker`.

    Raises:
        BadInput: a value that is not allowed; or no file is named and the master is not trusted to name one.
    """

    master: str = required(
        Option("Address of the master; several if it may restart at another one.", metavar="HOST:PORT[,...]")
    )
    model: Path | None = setting(
        None, Option("The master's model file, on this machine.", metavar="MODEL.py", positional=True)
    )
    trust_master: bool = setting(
        False,
        Option("Run whatever file of this machine the master names: it gives the master control of this account."),
    )
    deadline_s: float = setting(60.0, deadline("How long the master or the store may be unreachable."))
    transport: str = setting("auto", TRANSPORT)
    profile: Path | None = setting(None, PROFILE)
    insecure: bool = setting(False, of_network("With --http: serve others than this host without TLS and tokens."))
    http: str | None = setting(None, HTTP)

    def __post_init__(self) -> None:
        check_options(self)
        check_addresses(http=self.http)
        if self.model is None and not self.trust_master:
            raise BadInput(
                "no model file is named: write `elastable worker MODEL.py --master HOST:PORT` with the master's own "
                "file. --trust-master runs whatever file of this machine the master names, and so gives the master, "
                "and whoever answers at its address, this account"
            )
