"""Everything that a person can set about a job, validated together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastable.embedding_store.errors import BadInput

__all__ = ["TRANSPORTS", "JobOptions", "require_transport"]

TRANSPORTS = ("auto", "grpc", "shared")
"""From shared memory where that is possible; over gRPC; from shared memory or not at all."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Settings of `elastable train` and `elastable master`.

    Attributes:
        model_file: The model file.
        store: "memory" or redis://host:port.
        mode: "sync" or "async".
        grads_to_wait: Micro-batches that make one version; None: as the optimizer's gradient_accumulation_steps says,
            else `grads_to_wait_else`.
        grads_to_wait_else: See there.
        micro_batch_size: Records in a micro-batch.
        epochs: Passes over the training records.
        seed: Of record order, initial values and dropout.
        shuffle: Whether records are shuffled.
        average: "mean" (as Keras divides), "records" or "sum" of the micro-batches' gradients; see `JobSpec`.
        not_finite: "refuse" or "skip" gradients with NaN or Inf.
        intra_op_threads: TensorFlow threads of every worker.
        lazy: Whether a step moves only the rows that its batch touches.
        offload_above: Keras embeddings of more elements go to the store; 0: none.
        locations: TOML file of tensor locations; None: every table is in `store`.
        run_dir: Home of run directories.
        checkpoint_dir: Where checkpoints go, a path or a URL that fsspec knows; None: in the run directory.
        checkpoint_every: Versions between checkpoints; 0: only at the end.
        keep: Checkpoints that stay.
        full_every: Every so many of them one is full, the others hold what changed; 1: all are full.
        warm_start: A checkpoint, of any model, whose rows a new job begins with; None: of none.
        warm_tables: Tables that begin so; (): all that both models have.
        evaluate_every: Versions between evaluations beside training; 0: at the end of epochs only.
        resume: Go on where an earlier job ended: at the version that stands in a store that outlived its
            master, or from the newest checkpoint in `checkpoint_dir`; anew, if there is neither.
        rerun: With `resume`: whether a new job begins where the earlier one is finished.
        overwrite: Whether tables of an earlier job in the store are dropped.
        take_over: Whether a store is taken from a job that runs on it; that job fails.
        export: Whether to write the trained model as plain `.keras`.
        listen: host:port of the master; port 0 takes a free one.
        insecure: Whether the master may be open to everybody who reaches it.
        lease_s: Seconds after which a micro-batch that a worker does not report is given to another one too.
        backup_after_s: As `lease_s`, but only where that worker is idle; None: never before.
        staleness_bound: Async: by how many versions a gradient may be behind; None: any number.
        staleness_modulation: Async: "none", or "inverse": late gradients get a smaller learning rate.
        deadline_s: How long a worker or store may stay away.
        transport: How rows in the master's memory come to workers, one of `TRANSPORTS`.
    """

    model_file: Path
    store: str = "memory"
    mode: str = "sync"
    grads_to_wait: int | None = None
    grads_to_wait_else: int = 1
    micro_batch_size: int = 256
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    average: str = "mean"
    not_finite: str = "refuse"
    intra_op_threads: int = 1
    lazy: bool = True
    offload_above: int = 0
    locations: Path | None = None
    run_dir: Path = Path("runs")
    checkpoint_dir: str | Path | None = None
    checkpoint_every: int = 0
    keep: int = 3
    full_every: int = 5
    warm_start: str | Path | None = None
    warm_tables: tuple[str, ...] = ()
    evaluate_every: int = 0
    resume: bool = False
    rerun: bool = False
    overwrite: bool = False
    take_over: bool = False
    export: bool = True
    listen: str = "127.0.0.1:0"
    insecure: bool = False
    lease_s: float = 60.0
    backup_after_s: float | None = None
    staleness_bound: int | None = None
    staleness_modulation: str = "none"
    deadline_s: float = 60.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0 or self.keep < 0:
            raise BadInput(
                f"checkpoint_every and keep must not be negative, got {self.checkpoint_every} and {self.keep}"
            )
        if self.full_every < 1:
            raise BadInput(f"full_every must be at least 1, got {self.full_every}")
        if self.warm_tables and self.warm_start is None:
            raise BadInput("--warm-tables needs --warm-start: the checkpoint to take the rows from")
        require_transport(self.transport)
        if self.evaluate_every < 0:
            raise BadInput(f"evaluate_every must not be negative, got {self.evaluate_every}")
        if self.rerun and not self.resume:
            raise BadInput("--rerun needs --resume: it says what --resume does where the earlier job is finished")
        if self.resume and self.checkpoint_dir is None and not self.store.startswith(("redis://", "rediss://")):
            raise BadInput("--resume needs --checkpoint-dir: the place to resume from")
        for name, seconds in (("deadline", self.deadline_s), ("lease", self.lease_s), ("backup", self.backup_after_s)):
            if seconds is not None and not seconds > 0:
                raise BadInput(f"{name} must be above 0 seconds, got {seconds}")


def require_transport(transport: str) -> None:
    """Raises `BadInput` for a transport that is none of `TRANSPORTS`."""
    if transport not in TRANSPORTS:
        raise BadInput(f"transport {transport!r} is unknown: write {', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]}")
