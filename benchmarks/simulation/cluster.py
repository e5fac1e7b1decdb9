"""What is simulated, and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.scale.setting import Run


@dataclass(frozen=True, slots=True)
class Cluster:
    """A job and the hosts it runs on: one for the master and one for each worker and store server, or one for all.

    Attributes:
        workers, stores: How many there are of them.
        ids: Different rows of a micro-batch.
        dim: Values of a row.
        dense: Values of all dense variables.
        step_s: Seconds of a worker's dense step.
        rows: Of all tables together.
        examples: Of a micro-batch.
        gbit: Of every network card, each way, in Gbit/s; None: nothing is limited by the network.
        cores: That all processes share; None: every process has a core to itself.
        others: Cores' worth of work that other programs ask for, where cores are shared.
        staleness: By how many versions a push may be behind; None: the job is synchronous.
        spread: Standard deviation of a step's time, as a share of it.
        redis: Whether every store server writes changed rows to a Redis with a core of its own.
        seed: Of the steps' times.
    """

    workers: int
    stores: int
    ids: float
    dim: int
    dense: int
    step_s: float
    rows: float = 1e6
    examples: float = 1.0
    gbit: float | None = None
    cores: int | None = None
    others: float = 0.0
    staleness: int | None = None
    spread: float = 0.0
    redis: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated job did.

    Attributes:
        seconds, versions: How long it ran, and what it made; of asynchronous jobs a version is one micro-batch.
        latencies: Seconds: of synchronous jobs between versions, of asynchronous ones of a micro-batch.
        used: Resource -> the part of the time in which it was busy.
        refused: Micro-batches that were computed in vain.
        examples_per_s: Of what was committed.
    """

    seconds: float
    versions: int
    latencies: tuple[float, ...]
    examples_per_s: float
    used: Mapping[str, float] = field(default_factory=dict)
    refused: int = 0

    @property
    def limit(self) -> str:
        """The resource that is busy for the longest; "waiting" where none is for half of the time."""
        name = max(self.used, key=lambda each: self.used[each])
        return name if self.used[name] >= 0.5 else "waiting"


def of_run(run: Run) -> Cluster:
    """The cluster of a measured run: one machine, whose cores other programs used in part."""
    of = run.setting
    return Cluster(
        of.workers, of.stores, run.unique, of.dim, of.dense, of.step_s, of.rows, redis=of.redis,
        cores=run.cores, others=run.other_cores,
    )  # fmt: skip
