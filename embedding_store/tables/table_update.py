"""From gradients by occurrence to new rows: grouped once, summed, one optimizer step a row, in one commit."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, VersionError
from elastable.embedding_store.native.range_pool import shared_pool
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.checks import as_ids, require_finite_of, require_gradients, require_ids
from elastable.embedding_store.tables.grouping import Coalescer

_DEADLINE_S = 60.0  # for others who commit to the same store at the same time to come to an end


class SparseGradient(Protocol):
    """What an update takes: an object with the attributes of `IndexedSlices`."""

    @property
    def values(self) -> npt.ArrayLike: ...

    @property
    def indices(self) -> npt.ArrayLike: ...


@dataclass(frozen=True, slots=True)
class IndexedSlices:
    """The gradient of a table, by occurrence.

    Another class with these two attributes will do, such as TensorFlow's own: see `SparseGradient`.

    Attributes:
        values: float32 `[n, dim]`.
        indices: Integers `[n]`: row i of `values` belongs to the row of id
            `indices[i]`. Ids may repeat: their gradients are summed.
    """

    values: Float32
    indices: Int64


@dataclass(frozen=True, slots=True)
class TableSlices:
    """What one table of a store is updated with.

    Attributes:
        spec: Of the table.
        slices: Its gradient: `values` and `indices`, as of `IndexedSlices`.
        optimizer: The table's own, if with another learning rate; None: as the table has it.
    """

    spec: TableSpec
    slices: SparseGradient
    optimizer: OptimizerSpec | None = None


def update_tables(store: EmbeddingStore, updates: Sequence[TableSlices], *, step: int | None = None) -> int:
    """One optimizer step on the rows of several tables of one store, all or nothing.

    Each id's gradients are summed as a left fold in the order of occurrence; then each id takes one step. Sums are held
    in memory of the calling thread that the next call uses again.

    Args:
        store: Where the tables are.
        updates: The tables, each once.
        step: Optimizer steps taken before this one (Keras' `iterations`);
            None: as many as the store has versions.

    Returns:
        The version of the store that this made.

    Raises:
        BadInput: a table twice, or an optimizer other than the table's.
        BadIds, IdOutOfRange, BadGradient: indices or values that do not fit.
        NotFinite: a gradient, or the sum of an id's, is NaN or infinite.
        StaleVersion: others committed to the store without an end.
        Whatever else `EmbeddingStore.commit` raises; no row has changed then.
    """
    return apply_updates(store, check_updates(updates), step)


def _other_rate(spec: TableSpec, optimizer: OptimizerSpec) -> float:
    """The learning rate that `optimizer` asks for on a table with another one.

    Raises:
        BadInput: it is not the table's optimizer, or differs in more than the
            learning rate: its slots are others, or a store elsewhere would not know.
    """
    own = row_optimizer(spec.optimizer)
    given = row_optimizer(optimizer)
    if _identity(given) != _identity(own):
        raise BadInput(
            f"table {spec.name!r} has the optimizer {_shown(own)}, and was to be updated with {_shown(given)}: "
            "all but the learning rate must be the same"
        )
    return given.default_learning_rate


def _identity(optimizer: RowOptimizer) -> tuple[str, str, bool, Mapping[str, float]]:
    """What two optimizers have in common that differ in their learning rates only."""
    named = {**dict(optimizer.spec.hyperparameters), **optimizer.hyperparameters, "learning_rate": 0.0}
    return optimizer.spec.name, optimizer.spec.keras_config, optimizer.spec.lazy, named


def _shown(optimizer: RowOptimizer) -> str:
    named = {**dict(optimizer.spec.hyperparameters), **optimizer.hyperparameters}
    shown = ", ".join(f"{name}={value:g}" for name, value in sorted(named.items()))
    return f"{optimizer.spec.name}({shown})" + ("" if optimizer.spec.lazy else " with lazy=False")


@dataclass(frozen=True, slots=True)
class _Checked:
    """A table's update that fits it: int64 `[n]`, float32 `[n, dim]`, both C-contiguous, and its learning rate."""

    table: str
    ids: Int64
    gradients: Float32
    learning_rate: float


def check_updates(updates: Sequence[TableSlices]) -> list[_Checked]:
    """The updates of one store, each of which fits its table. Raises as `update_tables`; nothing is changed."""
    checked: dict[str, _Checked] = {}
    for update in updates:
        spec, slices = update.spec, update.slices
        if spec.name in checked:
            raise BadInput(f"table {spec.name!r} appears twice among those to update: join its slices")
        if not hasattr(slices, "values") or not hasattr(slices, "indices"):
            raise BadInput(
                f"table {spec.name!r}: its gradient must be IndexedSlices, with values float32 [n, {spec.dim}] and "
                f"indices int64 [n], got {type(slices).__name__}"
            )
        if update.optimizer is None or update.optimizer == spec.optimizer:
            rate = row_optimizer(spec.optimizer).default_learning_rate
        else:
            rate = _other_rate(spec, update.optimizer)
        ids = slices.indices
        if type(ids) is not np.ndarray or ids.dtype != np.int64:
            ids = as_ids(ids, spec.name)
        ids = require_ids(spec, ids)
        gradients = require_gradients(spec, len(ids), np.asarray(slices.values))
        require_finite_of(spec.name, ids, gradients)
        checked[spec.name] = _Checked(spec.name, ids, gradients, rate)
    return list(checked.values())


def apply_updates(store: EmbeddingStore, updates: Sequence[_Checked], step: int | None) -> int:
    """Commits updates that were checked; returns the version of the store that this made."""
    pool, summed, rates = shared_pool(), {}, {}
    kept: list[Coalescer] = _of_thread.__dict__.setdefault("coalescers", [])  # one for each table at a time
    for number, update in enumerate(updates):
        if number == len(kept):
            kept.append(Coalescer())
        part = kept[number].coalesce_many([(update.ids, update.gradients, 1.0)], pool)
        require_finite_of(update.table, part.ids, part.gradients)  # finite numbers, whose sum may be none
        summed[update.table], rates[update.table] = part, update.learning_rate
    return store.update(summed, rates, step)


def commit_next(
    store: EmbeddingStore,
    updates: Mapping[str, TableUpdate],
    learning_rates: Mapping[str, float],
    step: int | None = None,
) -> int:
    """`EmbeddingStore.update` of a store that is asked for its version."""
    until = time.monotonic() + _DEADLINE_S
    while True:
        version = store.version()
        try:
            store.commit(Commit(version + 1, updates, version if step is None else step, learning_rates))
        except VersionError:
            # Someone else's commit came between: it counts, and ours comes after it.
            if time.monotonic() > until:
                raise
        else:
            return version + 1


_of_thread = threading.local()
