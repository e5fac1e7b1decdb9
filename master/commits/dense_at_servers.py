"""Dense gradients that store servers sum, and dense variables that workers get there: a slice at each server."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.shards.row_pushes import DenseSlice, Measured, RowSums
from elastable.embedding_store.shards.shard_store import ShardStore
from elastable.embedding_store.support.retry import retry
from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.commits.row_gradients import PushesLost
from elastable.master.push_check import TensorSpec

__all__ = ["DenseAtServers", "worth_servers"]

# Where there are fewer, more calls to every store server cost more than the master saves: see docs/scale.md.
_LEAST_BYTES, _LEAST_MICRO_BATCHES = 128 << 20, 8


def worth_servers(size: int, micro_batches: int) -> bool:
    """Whether `--dense-at auto` has store servers sum dense gradients.

    Args:
        size: Bytes of all dense variables.
        micro_batches: Of a version.
    """
    return micro_batches >= _LEAST_MICRO_BATCHES and size * micro_batches >= _LEAST_BYTES


_log = logging.getLogger(__name__)


class DenseAtServers:
    """Used by one thread at a time.

    The master remains the only one that changes dense variables: what servers have of them is a copy, without which
    workers ask the master.

    Args:
        servers: All of the job's.
        variables: Trainable dense variables, in model order.
        deadline_s: How long a sum is tried again while a server is away.

    Attributes:
        layout: The variables, as servers know them.
    """

    def __init__(self, servers: ShardStore, variables: tuple[TensorSpec, ...], deadline_s: float) -> None:
        self._servers, self._variables, self._deadline_s = servers, variables, deadline_s
        self.layout = {
            place: DenseSlice(spec.dtype, math.prod(spec.shape), spec.name) for place, spec in enumerate(variables)
        }

    def summed(self, sums: RowSums, squares: bool) -> tuple[tuple[Tensor, ...], Measured]:
        """The dense gradient of a version, in model order, and what the servers measured of its rows.

        Args:
            sums: What is summed.
            squares: Whether rows are to be measured.

        Raises:
            PushesLost: some pushes have to come again.
        """
        measured = retry(
            lambda: self._servers.sum_dense(sums, self.layout, squares), "summing dense gradients", self._deadline_s
        )
        if measured.missing:
            raise PushesLost(measured.missing)
        gradients = (measured.dense[place].reshape(spec.shape) for place, spec in enumerate(self._variables))
        return tuple(gradients), measured

    def publish(self, snapshot: DenseSnapshot) -> DenseSnapshot:
        """Lets workers get the variables of a version from the servers; says so in what is returned, if they can."""
        try:
            self._servers.keep_dense(snapshot.version, dict(enumerate(snapshot.variables)), self.layout)
        except ElastableError as error:
            # The next commit waits for the server, or fails with it.
            _log.warning("workers get the dense variables of version %d here: %s", snapshot.version, error)
            return snapshot
        return replace(snapshot, at_servers=True)
