"""What the processes of a job cost, measured once: processor seconds of workers, store servers, master and Redis."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

from elastable.embedding_store.errors import BadInput

INSTALLED = Path(__file__).with_name("calibration.json")
"""The one that is stored; `python -m benchmarks.scale` writes it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Processor seconds, each for one of what its name says.

    Attributes:
        machine: Where it was taken, and with which versions.
        worker_version: A worker's, of a version, besides what follows.
        worker_server: A worker's, of a version and a store server.
        worker_row: A worker's, of a row that is looked up and whose gradient is pushed.
        worker_value: The same, of a value of such a row.
        worker_dense: A worker's, of a dense value that is pulled and pushed.
        store_push: A store server's, of a worker's lookup and push.
        store_version: A store server's, of a commit.
        store_row: A store server's, of a row that is looked up, pushed and committed.
        store_value: The same, of a value of such a row.
        lookup_share, push_share: The part of `store_row` and `store_value` that is the lookup's and the push's; what is
            left is the commit's.
        master_version: The master's, of a version, besides what follows.
        master_push: The master's, of a worker's tasks and push.
        master_server: The master's, of a version and a store server.
        master_dense: The master's, of a dense value of a push: it is sent, received and summed.
        master_update: The master's, of a dense value that takes a step.
        store_redis_row, store_redis_value: A store server's, of a row that it writes to Redis, and of a value of it.
        redis_row: Redis', of a row that is written to it.
        redis_value: The same, of a value of such a row.
        crowd: By which part of itself a process's time grows for every process more than one that shares a core with
            it, as they displace one another's caches.
        beside: The share of all processor time that nobody waits for, as another thread goes on meanwhile.
        wait: Seconds of a version in which nobody computes: round trips and threads that are woken.
    """

    machine: str
    worker_version: float
    worker_server: float
    worker_row: float
    worker_value: float
    worker_dense: float
    store_push: float
    store_version: float
    store_row: float
    store_value: float
    lookup_share: float
    push_share: float
    master_version: float
    master_push: float
    master_server: float
    master_dense: float
    master_update: float
    store_redis_row: float
    store_redis_value: float
    redis_row: float
    redis_value: float
    crowd: float
    beside: float
    wait: float

    def crowded(self, processes: int, cores: int | None) -> float:
        """What all processor time is multiplied by where so many processes share cores; None: each has its own."""
        return 1.0 if cores is None else 1.0 + self.crowd * max(0.0, processes / cores - 1.0)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "machine":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise BadInput(f"calibration: {each.name} is {value!r}; write seconds, 0 or more")
        if self.beside > 1:
            raise BadInput(f"calibration: beside is {self.beside!r}; it is a part of 1")
        if self.lookup_share + self.push_share > 1:
            raise BadInput("calibration: lookup_share and push_share are parts of a whole, and together more than 1")

    @classmethod
    def read(cls, path: Path = INSTALLED) -> "Calibration":
        """The calibration of a file.

        Raises:
            BadInput: there is no such file, or it is none of a calibration; names the file and what is wrong.
        """
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"calibration {path}: {error.strerror}") from error
        except ValueError as error:
            raise BadInput(f"calibration {path} is not JSON: {error}") from error
        names = {each.name for each in fields(cls)}
        if not isinstance(saved, dict) or set(saved) != names:
            found = set(saved) if isinstance(saved, dict) else set()
            raise BadInput(
                f"calibration {path}: it lacks {sorted(names - found)}, and {sorted(found - names)} are unknown; "
                "write one with python -m benchmarks.scale"
            )
        return cls(**saved)
