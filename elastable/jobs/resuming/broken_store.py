"""A store that has lost rows, of a job that is resumed: what is left of it makes room for the newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.remains import OnBroken, Remains
from elastable.jobs.resuming.resume import is_finished, refuse_anothers_record, refuse_live_owner, refuse_other_job
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import Checkpoint
from elastable.master.checkpoints.restoring import refuse_other_model

__all__ = ["giving_way_to"]

_log = logging.getLogger(__name__)


def giving_way_to(
    checkpoint: Checkpoint,
    tables: Mapping[str, TableSpec],
    job: JobSpec,
    *,
    overwrite: bool,
    take_over: bool,
    rerun: bool,
) -> OnBroken:
    """Decides for `open_store` whether what is left of a broken store may be deleted, since the job has a checkpoint.

    Everything that could keep the checkpoint from being restored is checked before.

    Args:
        checkpoint: That the job goes on from.
        tables: Of its model.
        job, overwrite, take_over, rerun: As of `fill_store`.

    Returns:
        What raises `BadInput` where another process uses the store, or where it is another job's; `CheckpointError`
        for a checkpoint that is damaged or another model's; `Unsupported` where the job had other options.
    """

    def give_way(error: StoreBroken, remains: Remains) -> None:
        if not take_over:
            refuse_live_owner(remains.other_writer)
        if rerun and is_finished(checkpoint.job, checkpoint.progress(), job):
            _log.warning("the store cannot go on: %s; what is left of it is deleted, and a new job begins", error)
            return
        refuse_anothers_record(remains.record(), checkpoint, overwrite)
        refuse_other_job(checkpoint.address, checkpoint.job, job)
        refuse_other_model(checkpoint, tables)
        checkpoint.verify()
        _log.warning(
            "the store cannot go on: %s; what is left of it is deleted, and the job goes on from %s, version %d",
            error,
            checkpoint.address,
            checkpoint.version,
        )

    return give_way
