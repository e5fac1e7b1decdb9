"""What is run, and what was measured of it. Importable without TensorFlow."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastable.embedding_store.contract.malformed import Document


@dataclass(frozen=True, slots=True)
class Setting:
    """A job of stub workers; every version takes one micro-batch of each.

    Attributes:
        workers, stores: How many there are of them.
        ids: Drawn uniformly for a micro-batch.
        dim: Values of a row.
        dense: Values of all dense variables.
        step_s: Seconds that a worker pauses in place of its dense step.
        rows: Of the table.
        redis: Whether the store servers keep their rows in Redis; else in memory.
    """

    workers: int
    stores: int
    ids: int = 16_384
    dim: int = 16
    dense: int = 140_000
    step_s: float = 0.01
    rows: int = 1_000_000
    redis: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What a job did in a while.

    Attributes:
        setting: The job.
        seconds: The while.
        versions: Made in it.
        unique: Different ids of a micro-batch, on average.
        p50_s, p99_s: Of the times between versions.
        worker_s, store_s, master_s, redis_s: Processor seconds, of all processes of a kind together.
        other_cores: Cores that other programs kept busy.
        cores: Of the machine.
        master_bytes: Through the connections of the master.
    """

    setting: Setting
    seconds: float
    versions: int
    unique: float
    p50_s: float
    p99_s: float
    worker_s: float
    store_s: float
    master_s: float
    redis_s: float
    other_cores: float
    cores: int
    master_bytes: float = 0.0

    @property
    def rows_per_s(self) -> float:
        """Rows that were looked up, pushed and committed, a second."""
        return self.versions * self.unique * self.setting.workers / self.seconds

    @property
    def million_rows(self) -> float:
        """Millions of rows that were looked up, pushed and committed."""
        return self.rows_per_s * self.seconds / 1e6


def write_runs(path: Path, runs: Sequence[Run]) -> None:
    """Stores runs as JSON."""
    path.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


def read_runs(path: Path) -> list[Run]:
    """The runs of a file."""
    runs: list[Document] = json.loads(path.read_text())
    return [Run(**{**run, "setting": Setting(**run["setting"])}) for run in runs]
