"""What a job computes: the description that the master sends to every worker."""

from __future__ import annotations

from dataclasses import dataclass, fields

from elastable.embedding_store.errors import BadSpec

__all__ = ["KNOWN_VALUES", "JobSpec"]

KNOWN_VALUES = {
    "mode": ("sync", "async"),
    "average": ("mean", "records", "batches", "sum"),
    "not_finite": ("refuse", "skip"),
    "staleness_modulation": ("none", "inverse"),
}


# Field -> the mode that it belongs to, and why it has no meaning in the other one.
_OF_ONE_MODE = {
    "staleness_bound": ("async", "in sync mode nothing is stale"),
    "staleness_modulation": ("async", "in sync mode nothing is stale"),
    "steps_per_epoch": ("sync", "in async mode an epoch is a pass over the records"),
}
_LEAST = {
    **dict.fromkeys(("micro_batch_size", "grads_to_wait", "epochs", "intra_op_threads"), 1),
    **dict.fromkeys(
        ("train_records", "validation_records", "offload_above", "steps_per_epoch", "initial_epoch",
         "evaluation_batch_size"), 0
    ),
}  # fmt: skip
_MOST = {"intra_op_threads": 2**31 - 1}  # as it is sent to workers; any other number: 2**63 - 1


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a job computes; the same on every process that takes part.

    Attributes:
        job: Unique id of the run.
        mode: "sync" or "async".
        micro_batch_size: Records in a micro-batch.
        grads_to_wait: Micro-batches that make one version.
        epochs: Passes over the training records, or, with `steps_per_epoch`,
            parts of them; the epoch to end at, counted from 0.
        seed: Of the record order, dropout and initial values.
        intra_op_threads: TensorFlow's, on every worker: it changes roundings,
            so it belongs to the job and not to the host.
        store_url: "master": rows are looked up at the master; or grpc://host:port of the store's server.
        model_file: Path of the model file as the master knows it; "" in process.
        model_sha256: Of that file's bytes.
        offload_above: Keras embeddings of more than this many elements move to
            the store; 0 leaves them alone.
        on_worker: Tables that are Keras variables of the workers and in no store.
        train_records, validation_records: Sizes of the splits.
        shuffle: Whether the record order is a seeded permutation.
        average: How the micro-batches of a version are combined. "mean": as Keras would divide the loss of one batch
            of all their records; a loss of which that cannot be seen is refused where there are several. "records":
            each weighs its records, whatever its loss was divided by. "batches": all weigh the same, as in Keras'
            gradient_accumulation_steps. "sum": each weighs 1.
        not_finite: "refuse" a push with NaN or Inf (an error), or "skip" it.
        staleness_bound: Async: by how many versions a push may be behind when
            it is committed; one that is older is refused, and its micro-batch
            computed again. None: any number.
        staleness_modulation: Async: "none", or "inverse": the learning rate of
            a push that is s versions behind is divided by 1 + s.
        steps_per_epoch: Sync: steps in an epoch, where it is not a whole pass
            over the records (`elastable.master.tasks.schedule.Schedule`); 0: it is.
        initial_epoch: The epoch that the job begins at.
        evaluation_batch_size: Records evaluated together; 0: `micro_batch_size`.
    """

    job: str = ""
    mode: str = "sync"
    micro_batch_size: int = 256
    grads_to_wait: int = 1
    epochs: int = 1
    seed: int = 0
    intra_op_threads: int = 1
    store_url: str = "master"
    model_file: str = ""
    model_sha256: str = ""
    offload_above: int = 0
    on_worker: tuple[str, ...] = ()
    train_records: int = 0
    validation_records: int = 0
    shuffle: bool = True
    average: str = "mean"
    not_finite: str = "refuse"
    staleness_bound: int | None = None
    staleness_modulation: str = "none"
    steps_per_epoch: int = 0
    initial_epoch: int = 0
    evaluation_batch_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_worker", tuple(self.on_worker))
        for name, known in KNOWN_VALUES.items():
            if getattr(self, name) not in known:
                raise BadSpec(f"job {name} {getattr(self, name)!r}: use {' or '.join(known)}")
        for name, (mode, reason) in _OF_ONE_MODE.items():
            if self.mode != mode and getattr(self, name) != _DEFAULTS[name]:
                raise BadSpec(f"job {name} is for mode {mode}: {reason}")
        for each in fields(JobSpec):
            value, most = getattr(self, each.name), _MOST.get(each.name, 2**63 - 1)
            if isinstance(value, int) and not -most - 1 <= value <= most:
                raise BadSpec(f"job {each.name} must lie within {-most - 1} and {most}, got {value}")
        if self.staleness_bound is not None and self.staleness_bound < 0:
            raise BadSpec(f"job staleness_bound must not be negative, got {self.staleness_bound}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                limit = f"at least {least}" if least else "not be negative"
                raise BadSpec(f"job {name} must {'be ' if least else ''}{limit}, got {getattr(self, name)}")

    @property
    def micro_batches_per_version(self) -> int:
        """Micro-batches that make one version: `grads_to_wait`; async: 1."""
        return self.grads_to_wait if self.mode == "sync" else 1


_DEFAULTS = {each.name: each.default for each in fields(JobSpec)}
