"""The optimizers of rows beyond the store's own, made known to a process that has not imported Keras.

A process that runs a model imports Keras anyway. A server without a model needs it only when it is asked for a table
whose optimizer has no kernel, so such a server also runs where Keras is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.optimizers.base import KERAS_BLOCK, RowOptimizer
from elastable.embedding_store.optimizers.registry import register_row_optimizer
from elastable.embedding_store.support.extras import needs
from elastable.master.keras.row_optimizers import averaging, constraints  # noqa: F401 - they register their optimizers

__all__ = ["register_job_optimizers"]


def register_job_optimizers(import_keras: Callable[[], None] = lambda: None) -> None:
    """Lets `row_optimizer` make every optimizer that a job's tables may have.

    Args:
        import_keras: Called before Keras is first imported, so that nobody sees what its backend says at its start.

    Raises (from `row_optimizer`):
        NotInstalled: Keras is needed for a spec and is not installed here.
    """
    register_row_optimizer(KERAS_BLOCK, partial(_keras_block, import_keras))


def _keras_block(import_keras: Callable[[], None], spec: OptimizerSpec) -> RowOptimizer:
    with needs("a table whose Keras optimizer has no kernel of its own"):
        import_keras()
        from elastable.master.keras.row_optimizers.keras_block import (
            KerasBlockOptimizer,  # registers itself in the place of this
        )
    return KerasBlockOptimizer(spec)
