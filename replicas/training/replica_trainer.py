"""`et.ReplicaTrainer`: data-parallel training over replicas, with checkpoints."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.master.api import JobSpec, Tensor
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.tasks.progress import Progress
from elastable.replicas.groups.agreement import run_at_root
from elastable.replicas.training.trainer import ShardedTrainer

__all__ = ["ReplicaTrainer"]


class ReplicaTrainer(ShardedTrainer):
    """A `ShardedTrainer` with checkpoints, in the format of a job without tables (docs/checkpoints.md).

    They hold whole tensors in the order of unsharded training; `elastable checkpoint` reads them.
    """

    _job = ""

    def save(self, directory: str | Path, *, keep: int = 3) -> str:
        """Writes a checkpoint of the current step; every replica calls it, rank 0 writes.

        Rank 0 needs memory for one copy of all weights and optimizer state.

        Args:
            directory: Directory of checkpoints: a path, or a URL that fsspec supports.
            keep: How many of this training's newest checkpoints to keep; 0: all.

        Returns:
            The checkpoint's address.

        Raises:
            CheckpointError: it cannot be written; raised on every replica.
            ModelError: the model is not compiled or not built.
        """
        tensors = {key: tensor for key, tensor in self.whole_tensors() if self.group.rank == 0}
        self._job = self._job or uuid.uuid4().hex[:12]

        def write() -> str:
            with MemoryStore() as no_tables:
                no_tables.reset_version(self.step)
                job, progress = JobSpec(job=self._job, seed=self.seed), Progress(self.step)
                return write_checkpoint(directory, no_tables, tensors, job, progress, keep=keep)

        return run_at_root(self.group, write)

    def load(self, place: str | Path) -> None:
        """Loads a checkpoint of any number of replicas and any sharding; every replica calls it.

        Training continues as if it had never stopped, to the bit with the same
        number of replicas: pass `initial_epoch` to `fit`.

        Args:
            place: A checkpoint, or a directory of them (its newest); rank 0 reads it.

        Raises:
            CheckpointError: there is none, a file is damaged (named), or it belongs to
                another model or optimizer; raised on every replica, and nothing has changed.
            ModelError: the model is not compiled or not built.
        """
        read: dict[str, Tensor] = {}

        def open_it() -> str:
            found = open_checkpoint(place)
            if found.manifest.tables:
                raise CheckpointError(
                    f"{found.address} holds tables ({', '.join(sorted(found.manifest.tables))}): it is of a job with a "
                    "master, and not of a ReplicaTrainer"
                )
            read.update(found.dense())
            return json.dumps({"step": found.version, "job": str(found.job.get("job", ""))})

        found = json.loads(run_at_root(self.group, open_it))
        self.restore(read, found["step"])
        self._job = found["job"]
