"""A host embedding without a framework: its optimizer, collective lookups and updates on NumPy arrays, its state."""

import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Array, Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, BadSpec
from elastable.embedding_store.native.range_pool import shared_pool
from elastable.embedding_store.optimizers.registry import known_row_optimizers, row_optimizer
from elastable.embedding_store.tables.checks import require_gradients
from elastable.embedding_store.tables.grouping import Coalescer, GradientPart, coalesce_many
from elastable.replicas.groups.group import ReplicaGroup, fail_together
from elastable.replicas.host_embeddings.exchanges import GatheredIds, RowExchange, gather_ids

# How a host embedding is trained: optimizer, learning rate and gradient accumulation


LearningRate = float | Callable[[int], float]
"""A number, or a function of the number of steps taken before, such as a Keras schedule."""


class HostEmbeddingOptimizerSpec:
    """The optimizer of a host embedding's rows, named as in `tensorflow.python.ipu.embedding_ops`.

    Attributes:
        optimizer: The embedding store's spec of the optimizer.
        accumulation_factor: Number of lookups whose gradients are summed for one step.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        optimizer_name: str | None = None,
        *,
        accumulation_factor: int = 1,
        lazy: bool = True,
        **hyperparameters: float,
    ) -> None:
        """Describes the training.

        Args:
            learning_rate: A number, or a schedule called with the steps taken before; 0: no training.
            optimizer_name: A fused optimizer, in any case ("SGD", "adagrad", "Adam", ...); None: "sgd".
            accumulation_factor: Number of lookups per step, at least 1.
            lazy: Whether a step updates only rows with a gradient. False: all rows, as Keras' dense optimizers.
            **hyperparameters: The optimizer's others, with Keras' names (`momentum`, `beta_1`, ...).

        Raises:
            BadSpec: an invalid optimizer, hyperparameter, learning rate or factor; names it.
            Unsupported: `lazy=False` for an optimizer without a dense form.
        """
        name = "sgd" if optimizer_name is None else str(optimizer_name).lower()
        fused = [known for known in known_row_optimizers() if known != "keras"]
        if name not in fused:
            raise BadSpec(
                f"host embedding optimizer {optimizer_name!r}: known optimizers are {', '.join(fused)}; None is sgd"
            )
        rate = 0.01 if callable(learning_rate) else _checked_rate(learning_rate)
        if not isinstance(accumulation_factor, numbers.Integral) or accumulation_factor < 1:
            raise BadSpec(
                f"host embedding optimizer: accumulation_factor must be an integer of at least 1, got "
                f"{accumulation_factor!r}"
            )
        self._learning_rate: LearningRate = learning_rate
        self.optimizer: OptimizerSpec = OptimizerSpec.of(name, lazy=lazy, learning_rate=rate, **hyperparameters)
        self.accumulation_factor: int = int(accumulation_factor)
        row_optimizer(self.optimizer)  # refuses unknown hyperparameters

    @property
    def trains(self) -> bool:
        """Whether steps change anything: the learning rate is not 0."""
        return callable(self._learning_rate) or float(self._learning_rate) != 0.0

    def rate_at(self, step: int) -> float:
        """The learning rate after `step` steps. Raises BadSpec unless it is finite and at least 0."""
        rate = self._learning_rate
        return _checked_rate(float(rate(step)) if callable(rate) else rate)

    def described(self) -> dict[str, object]:
        """The JSON values that replicas must agree on, by name."""
        return {
            "optimizer": self.optimizer.name,
            "hyperparameters": {key: value for key, value in self.optimizer.hyperparameters if key != "learning_rate"},
            "learning_rate": "a schedule" if callable(self._learning_rate) else float(self._learning_rate),
            "lazy": self.optimizer.lazy,
            "accumulation_factor": self.accumulation_factor,
        }


class HostEmbeddingSGDGAOptimizerSpec(HostEmbeddingOptimizerSpec):
    """SGD over sums of the gradients of several lookups."""

    def __init__(self, learning_rate: LearningRate, accumulation_factor: int) -> None:
        super().__init__(learning_rate, "sgd", accumulation_factor=accumulation_factor)


def _checked_rate(rate: object) -> float:
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not math.isfinite(rate) or rate < 0:
        raise BadSpec(
            f"host embedding optimizer: learning_rate must be a finite number of at least 0, or a schedule of them, "
            f"got {rate!r}"
        )
    return float(rate)


State = dict[str, Array]
"""Arrays by name:

* `weights`: float32 `[rows, dim]`.
* `slots/NAME`: float32 `[rows, dim]`, or `[rows, 1]` for one value per row; one for each of the optimizer's slots.
* `step`: int64 scalar, optimizer steps taken.
* `pending/lookups`: int64 scalar, lookups accumulated for the next step.
* `pending/ids`: int64 `[u]`, ascending, and `pending/gradients`: float32 `[u, dim]`, their sums.
"""


def state_of(spec: TableSpec, block: RowBlock) -> State:
    """`weights` and slots of all rows, in order."""
    state: State = {"weights": block.weights}
    start = 0
    for name, width in _slots(spec):
        state[f"slots/{name}"] = block.slots[:, start : start + width]
        start += width
    return state


def block_of(spec: TableSpec, state: Mapping[str, Array]) -> RowBlock:
    """The rows of a validated state."""
    rows = int(spec.vocabulary_size or 0)
    slots = [np.empty((rows, 0), np.float32), *(np.asarray(state[f"slots/{name}"]) for name, _ in _slots(spec))]
    joined: Float32 = np.ascontiguousarray(np.concatenate(slots, axis=1))
    return RowBlock(np.arange(rows), np.ascontiguousarray(state["weights"]), joined)


def state_shapes(spec: TableSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of every array of a state; -1 is any length."""
    rows = int(spec.vocabulary_size or 0)
    slots = {f"slots/{name}": ("float32", (rows, width)) for name, width in _slots(spec)}
    return {
        "weights": ("float32", (rows, spec.dim)),
        **slots,
        "step": ("int64", ()),
        "pending/lookups": ("int64", ()),
        "pending/ids": ("int64", (-1,)),
        "pending/gradients": ("float32", (-1, spec.dim)),
    }


def require_state(spec: TableSpec, state: Mapping[str, Array]) -> None:
    """Raises BadInput for a missing or unknown array, or one with another dtype or shape."""
    wanted = state_shapes(spec)
    for name in sorted({*wanted, *state}):
        state_name = f"host embedding {spec.name!r}: its state"
        if name not in state:
            raise BadInput(f"{state_name} has no {name!r}; it needs {', '.join(wanted)}")
        if name not in wanted:
            raise BadInput(f"{state_name} has an unknown {name!r}; known are {', '.join(wanted)}")
        dtype, shape = wanted[name]
        given = np.asarray(state[name])
        fits = len(given.shape) == len(shape) and all(w in (-1, g) for w, g in zip(shape, given.shape, strict=True))
        if given.dtype != np.dtype(dtype) or not fits:
            raise BadInput(
                f"{state_name}: {name!r} must be {dtype} {_shape_text(shape)}, got {given.dtype} {list(given.shape)}"
            )
    ids = state["pending/ids"]
    if len(ids) != len(state["pending/gradients"]) or (
        len(ids) and not (ids[0] >= 0 and ids[-1] < (spec.vocabulary_size or 0) and (np.diff(ids) > 0).all())
    ):
        raise BadInput(
            f"host embedding {spec.name!r}: its state's pending/ids must ascend in 0 <= id < {spec.vocabulary_size}, "
            "one for each row of pending/gradients"
        )


def _slots(spec: TableSpec) -> tuple[tuple[str, int], ...]:
    """The optimizer's slots and their columns, in storage order."""
    slots = row_optimizer(spec.optimizer).slots
    return tuple((slot.name, spec.dim if slot.columns is None else slot.columns) for slot in slots)


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('n' if length < 0 else str(length) for length in shape)}]"


_lock = threading.Lock()
# Replicas may be threads of one process: the member of a group holds a name, not the process.
_held: WeakKeyDictionary[ReplicaGroup, set[str]] = WeakKeyDictionary()


class HostTable:
    """A table that the members of a group look up and train together; `create_host_embedding` makes one.

    Every method is a collective: all members call the same methods in the
    same order. Lookups and updates need a registration (`register`).

    Attributes:
        spec: The whole table.
        optimizer: How it is trained; None: not at all.
        strategy: "TOKEN" or "ENCODING".
        reduction: "mean" or "sum", over replicas.
        step: Number of optimizer steps taken.
    """

    def __init__(
        self,
        spec: TableSpec,
        optimizer: HostEmbeddingOptimizerSpec | None,
        exchange: RowExchange,
        strategy: str,
        reduction: str,
    ) -> None:
        self.spec = spec
        self.optimizer = optimizer if optimizer is not None and optimizer.trains else None
        self.strategy = strategy
        self.reduction = reduction
        self.step = 0
        self._exchange = exchange
        self._pending = PendingSums(exchange.dim)
        self._registered = False

    @property
    def group(self) -> ReplicaGroup:
        return self._exchange.group

    @contextmanager
    def register(self) -> Iterator[Self]:
        """Holds the exclusive lease of the name while the block runs.

        Raises:
            BadInput: the name is registered already (StoreFailed with the rank, on other replicas).
        """
        with ExitStack() as taken:
            with fail_together(self.group):
                taken.enter_context(_name_taken(self.group, self.spec.name))
            self._registered = True
            try:
                yield self
            finally:
                self._registered = False

    def lookup(self, indices: npt.ArrayLike, clip_indices: bool = True) -> Array:
        """The rows of this replica's indices.

        Args:
            indices: Integers of any shape.

        Returns:
            The table's dtype (bfloat16 of `ml_dtypes`), the indices' shape + `[dim]`.

        Raises:
            BadInput: the name is not registered.
            BadIds: the indices are not integers.
            IdOutOfRange: an index is outside the table and `clip_indices` is False; raised on every
                replica, with rank, position and index.
            The group's and the store's errors.
        """
        return self._in_its_dtype(self.lookup_with_ids(indices, clip_indices)[0])

    def lookup_with_ids(self, indices: npt.ArrayLike, clip_indices: bool = True) -> tuple[Float32, GatheredIds]:
        """`lookup` in float32, and the ids that `update` needs."""
        self._require_registered("looked up")
        batch, shape = gather_ids(self.group, self.spec, indices, clip_indices)
        rows = self._exchange.lookup(batch)
        return rows.reshape(*shape, self.spec.dim), batch

    def update(self, batch: GatheredIds, gradients: Float32) -> None:
        """Applies a lookup's gradients: one optimizer step, or a part of one if it accumulates.

        Gradients of one id are summed by lookup, replica and position, in float32, before the optimizer sees them.

        Args:
            gradients: float32 for every table dtype: this member's, with the lookup's shape.

        Raises:
            BadInput: the name is not registered.
            BadGradient: another dtype or number of values.
            The group's and the store's errors.
        """
        self._require_registered("updated")
        if self.optimizer is None:
            return
        count = int(batch.counts[self.group.rank])
        flat = gradients.reshape(-1, self.spec.dim) if gradients.size else np.empty((0, self.spec.dim), np.float32)
        flat = require_gradients(self.spec, count, flat)
        rate = self.optimizer.rate_at(self.step)
        parts = self._exchange.parts(batch, flat, batch.scales(self.reduction))
        sums = self._pending.add(parts, self.optimizer.accumulation_factor)
        if sums is not None:
            self._exchange.apply(sums, self.step, rate)
            self.step += 1

    def whole(self) -> Array:
        """`[rows, dim]` of the table's dtype: the current table, on every replica."""
        return self._in_its_dtype(self._exchange.whole().weights)

    def state(self) -> State:
        """Weights, slots and progress of the whole table, on every replica; see `State`."""
        state = state_of(self.spec, self._exchange.whole())
        ids, gradients = self._pending.whole(self._exchange)
        state |= {"step": np.array(self.step, np.int64), "pending/lookups": np.array(self._pending.lookups, np.int64)}
        return state | {"pending/ids": ids, "pending/gradients": gradients}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restores a `state` of any number of replicas and any strategy, the same on every replica.

        Raises:
            BadInput: it is not a state of this table; names the difference. Nothing has changed.
        """
        with fail_together(self.group):
            require_state(self.spec, state)
        self._exchange.replace(block_of(self.spec, state))
        pending = state["pending/ids"], state["pending/gradients"], int(state["pending/lookups"])
        self._pending.replace(self._exchange, *pending)
        self.step = int(state["step"])

    def close(self) -> None:
        """Frees the memory of this member's shard; does not close a given store."""
        self._exchange.close()

    def _in_its_dtype(self, rows: Float32) -> Array:
        """Rows are exchanged in float32, which represents every dtype exactly."""
        if self.spec.dtype == "bfloat16":
            import ml_dtypes  # comes with TensorFlow; only tables of this dtype need it

            return rows.astype(ml_dtypes.bfloat16)
        return rows.astype(self.spec.dtype, copy=False)

    def _require_registered(self, what: str) -> None:
        if not self._registered:
            raise BadInput(
                f"host embedding {self.spec.name!r} is {what} without being registered; do it within "
                "`with embedding.register():`"
            )


@contextmanager
def _name_taken(group: ReplicaGroup, name: str) -> Iterator[None]:
    """Holds the exclusive lease of a name; raises BadInput if it is held."""
    with _lock:
        names = _held.setdefault(group.outermost, set())
        if name in names:
            raise BadInput(
                f"host embedding {name!r} is registered already: a name has one registration at a time, which ends "
                "with its `with` block"
            )
        names.add(name)
    try:
        yield
    finally:
        with _lock:
            names.discard(name)


class PendingSums:
    """Sums of one member's part of a table: a left fold over lookups, replicas and positions.

    Attributes:
        lookups: Number of lookups in the sums.
    """

    def __init__(self, dim: int) -> None:
        self.lookups = 0
        self._nothing = TableUpdate(np.empty(0, np.int64), np.empty((0, dim), np.float32))
        self._sums = self._nothing
        self._coalescer = Coalescer()

    def add(self, parts: Sequence[GradientPart], of: int) -> TableUpdate | None:
        """Adds a lookup's gradients (`parts` as of `coalesce_many`).

        Returns:
            The sums once `of` lookups are in them; valid until the next call.
        """
        if of == 1 and not self.lookups:
            return self._cut(self._coalescer.coalesce_many(parts, shared_pool()))
        before: list[GradientPart] = [(self._sums.ids, self._sums.gradients, 1.0)] if self.lookups else []
        self._sums = self._cut(coalesce_many([*before, *parts], shared_pool()))
        self.lookups += 1
        if self.lookups < of:
            return None
        done, self._sums, self.lookups = self._sums, self._nothing, 0
        return done

    def _cut(self, sums: TableUpdate) -> TableUpdate:
        """A member without columns has sums without columns."""
        return sums if self._nothing.gradients.shape[1] else TableUpdate(sums.ids, sums.gradients[:, :0])

    def whole(self, exchange: RowExchange) -> tuple[Int64, Float32]:
        """The sums of all members: ids int64 `[u]`, ascending, and gradients float32 `[u, whole dim]`; collective."""
        group = exchange.group
        mine = np.ascontiguousarray(self._sums.gradients).reshape(-1)
        everyone = list(zip(group.all_gather_uneven(self._sums.ids), group.all_gather_uneven(mine), strict=True))
        kept = [exchange.kept_ids(rank)[ids] for rank, (ids, _) in enumerate(everyone)]
        ids = np.unique(np.concatenate(kept))
        gradients = np.zeros((len(ids), exchange.spec.dim), np.float32)
        for rank, (_, values) in enumerate(everyone):
            columns = exchange.columns_of(rank)
            rows = np.searchsorted(ids, kept[rank])
            gradients[rows, columns] = values.reshape(len(rows), columns.stop - columns.start)
        return ids, gradients

    def replace(self, exchange: RowExchange, ids: Int64, gradients: Float32, lookups: int) -> None:
        """Restores this member's part of what `whole` gave, of any number of members."""
        rank = exchange.group.rank
        kept = exchange.kept_ids(rank)
        mine = np.flatnonzero(np.isin(ids, kept))
        columns = exchange.columns_of(rank)
        own = np.ascontiguousarray(gradients[mine, columns])
        self._sums, self.lookups = TableUpdate(np.searchsorted(kept, ids[mine]).astype(np.int64), own), lookups
