"""Moving averages (`use_ema`): what becomes of them at the end of training."""

from collections.abc import Callable, Mapping

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.master.model.dense import DenseModel
from elastable.master.model.wrapping_optimizers import rows_become_averages


def finalize_averages(
    dense: DenseModel,
    store: EmbeddingStore,
    tables: Mapping[str, TableSpec],
    rows_changed: Callable[[Mapping[str, TableUpdate]], None] = lambda updates: None,
) -> None:
    """Training has ended: variables and rows that are trained become their moving averages, as in Keras.

    Doing it again changes nothing.

    Args:
        store: Holds the tables; nobody commits to it meanwhile.
        rows_changed: Called with rows that were written.
    """
    dense.finalize_averages()
    trained = sorted(set(tables) - set(dense.frozen_tables))
    rows_become_averages(store, trained, report_rows(rows_changed))


def report_rows(rows_changed: Callable[[Mapping[str, TableUpdate]], None]) -> Callable[[str, Int64], None]:
    """Calls `rows_changed` with an update without gradients for the table and the ids that it gets."""
    return lambda table, ids: rows_changed({table: TableUpdate(ids, np.zeros((len(ids), 0), np.float32))})
