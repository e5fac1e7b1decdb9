"""The dense part of a version, from the master, or from the store servers where these have its variables."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.shards.row_pushes import DenseSlice
from elastable.embedding_store.shards.shard_store import ShardStore
from elastable.master.api import DenseSnapshot, MasterApi

__all__ = ["DensePulls"]

_log = logging.getLogger(__name__)


class DensePulls:
    """Used by one thread.

    Args:
        master: The master, or its client.
        servers: The job's store servers; None: there are none.
        incarnation: Of the worker.
        job: Id of the job.
    """

    def __init__(self, master: MasterApi, servers: ShardStore | None, incarnation: str, job: str) -> None:
        self._master, self._servers = master, servers
        self._incarnation, self._job = incarnation, job

    def pull(self, version: int | None, wait_s: float) -> DenseSnapshot | None:
        """As `MasterApi.pull_dense`, with all variables."""
        snapshot = self._master.pull_dense(self._incarnation, version, wait_s)
        if snapshot is None or not snapshot.shapes:
            return snapshot
        if self._servers is not None:
            try:
                return _with_variables(snapshot, self._servers, self._job)
            except ElastableError as error:
                # A server that was started again has none; and they may have those of the next version by now.
                _log.debug("dense variables of version %d come from the master: %s", snapshot.version, error)
        return self._master.pull_dense(self._incarnation, snapshot.version, wait_s, whole=True)


def _with_variables(snapshot: DenseSnapshot, servers: ShardStore, job: str) -> DenseSnapshot:
    layout = {place: DenseSlice(dtype, math.prod(shape)) for place, (shape, dtype) in enumerate(snapshot.shapes)}
    values = servers.read_dense(job, snapshot.version, layout)
    variables = tuple(values[place].reshape(shape) for place, (shape, _) in enumerate(snapshot.shapes))
    return replace(snapshot, variables=variables, shapes=())
