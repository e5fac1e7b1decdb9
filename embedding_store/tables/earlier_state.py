"""Table states as earlier releases wrote them: the admission sketch, with the decay as its last 8 bytes."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.optimizers.registry import decays_untouched_rows

__all__ = ["state_from_bytes"]

_DECAY_BYTES = 8


def state_from_bytes(spec: TableSpec, written: UInt8) -> TableState:
    """The state of a table of `spec`, of `written` uint8 `[n]`: checkpoints, Keras files and file stores hold it."""
    if not decays_untouched_rows(spec.optimizer) or len(written) < _DECAY_BYTES:
        return TableState(written)
    counts, decay = written[:-_DECAY_BYTES], float(np.frombuffer(written[-_DECAY_BYTES:].tobytes(), "<f8")[0])
    return TableState(counts if len(counts) else None, decay)
