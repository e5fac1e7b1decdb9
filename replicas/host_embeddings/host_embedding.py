"""`create_host_embedding` and `HostEmbedding`: a host table as a Keras layer with gradients; its state in a file."""

import hashlib
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import NoReturn, Self

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array, Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadSpec, CheckpointError, Unsupported
from elastable.embedding_store.native.range_pool import available_cores
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles
from elastable.master.checkpoints.storage.tensor_file import parts_of, tensors_in
from elastable.replicas.groups.group import ReplicaGroup, fail_together, require_same
from elastable.replicas.groups.thread_group import ThreadGroup
from elastable.replicas.groups.world import replica_group
from elastable.replicas.host_embeddings.exchanges import (
    Callbacks,
    EncodingBuffers,
    GatheredIds,
    RowExchange,
    TokenBuffers,
    id_dtype,
    require_integers,
)
from elastable.replicas.host_embeddings.host_table import HostEmbeddingOptimizerSpec, HostTable, State
from elastable.worker.rows.store_layer import initializer_spec, seed_of

_KNOWN = {
    "partition_strategy": ("TOKEN", "ENCODING", "AUTO"),
    "reduction": ("mean", "sum"),
}
DTYPES = ("float32", "float16", "bfloat16")

InitialRows = str | InitializerSpec | Array | None


_HEADER_BYTES = 32  # per replica: number of ids, of samples, and the first id outside the table


# Constants of `seconds_per_step`, measured by `benchmarks/replicas/host_embeddings.py` (docs/host-embeddings.md).
_ID_S = 44e-9  # per id of all replicas, to group or sort it
_BYTE_S = 0.78e-9  # per byte of a row, to move and update it, both directions together
_TOKEN_SHARE = 0.10  # extra share of time for rows that are sorted by owner and put back
_UNEVEN_SHARE = 0.35  # extra share of time for columns that the replicas do not divide
_FAR_ROW_S = 42e-9  # per uncached piece of a row, both directions together
_CACHE_BYTES = 16e6  # of a replica
_LINK_BYTES_S = 5e9  # from one replica to the others


def bytes_per_step(strategy: str, rows: int, dim: int, replicas: int, lookups: int) -> tuple[int, int]:
    """What one replica sends in a lookup and its update, with remote buffers.

    With t rows of e columns, n replicas and b ids on each (on the longest, if they differ): `(32 + s b)(n - 1)` for
    ids, where s is 4 up to 2^31 rows and 8 beyond. For rows, and again for gradients: `4 b ceil(e / n)(n - 1)` by
    encoding; `4 b e (n - 1) / n` by token, if ids are spread evenly over the replicas.

    Args:
        strategy: "TOKEN" or "ENCODING".
        rows, dim: Size of the table.
        lookups: Ids of each replica.

    Returns:
        Bytes of ids, with their header; bytes of rows, as many as of gradients.
    """
    columns = -(-dim // replicas) if strategy == "ENCODING" else dim / replicas
    values = round(4 * lookups * columns * (replicas - 1))
    ids = (_HEADER_BYTES + np.dtype(id_dtype(rows)).itemsize * lookups) * (replicas - 1)
    return ids, values


def seconds_per_step(strategy: str, rows: int, dim: int, replicas: int, lookups: int) -> float:
    """Modelled seconds of a lookup and its update; arguments as of `bytes_per_step`.

    Both strategies group all replicas' ids and move as many bytes. By token, rows are sorted by owner and put back, but
    each is accessed once; by encoding, in n pieces on n replicas, which costs time if the table exceeds the caches, and
    columns are padded if n does not divide them.
    """
    far = max(0.0, 1.0 - _CACHE_BYTES * replicas / (4.0 * rows * dim))
    work = _ID_S * replicas + _BYTE_S * 4 * dim
    if strategy == "TOKEN":
        work = work * (1 + _TOKEN_SHARE) + far * _FAR_ROW_S
    else:
        work = work * (1 + _UNEVEN_SHARE * (dim % replicas > 0)) + far * _FAR_ROW_S * replicas
    ids, values = bytes_per_step(strategy, rows, dim, replicas, lookups)
    return lookups * work + (ids + 2 * values) / _LINK_BYTES_S


def choose_strategy(rows: int, dim: int, replicas: int) -> str:
    """The faster strategy, for "AUTO"; the number of lookups affects both alike.

    Raises:
        BadSpec: a number below 1.
    """
    if rows < 1 or dim < 1 or replicas < 1:
        raise BadSpec(f"a strategy needs rows, columns and replicas, got {rows}, {dim} and {replicas}")
    if replicas == 1:
        return "TOKEN"
    token, encoding = (seconds_per_step(of, rows, dim, replicas, 4096) for of in ("TOKEN", "ENCODING"))
    return "TOKEN" if token < encoding else "ENCODING"


def create_host_embedding(
    name: str,
    shape: Sequence[int],
    dtype: object = np.float32,
    partition_strategy: str = "TOKEN",
    optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    initializer: InitialRows | keras.initializers.Initializer = None,
    *,
    group: ReplicaGroup | None = None,
    store: EmbeddingStore | None = None,
    reduction: str = "mean",
    seed: int = 0,
    threads: int | None = None,
) -> "HostEmbedding":
    """Creates an embedding that all members of a group look up and train; every member calls it with the same options.

    Args:
        name: Name of the table.
        shape: Rows and columns.
        dtype: float32, float16 or bfloat16, as NumPy or TensorFlow name them.
        partition_strategy: "TOKEN", "ENCODING", or "AUTO" (chosen by the cost model).
        optimizer_spec: How to train it; None: not at all.
        initializer: A Keras initializer, the name of a kind of `InitializerSpec`, such a spec, or the
            rows `[rows, columns]`. None: uniform from -0.05 to 0.05, as Keras' Embedding.
        group: The replicas. None: all processes that MPI started, or this one alone.
        store: Keeps the rows, and all replicas reach it: they are exchanged by callbacks. None: by remote buffers, in
            the replicas' own memory.
        reduction: Of the replicas' gradients. "mean": weighted by their batches, so that mean losses of
            the parts become the mean loss of the whole batch. "sum".
        seed: Seed of the initial values.
        threads: Threads per replica for large lookups and updates; None: one per core. Does not affect results.

    Raises:
        BadSpec: an invalid option, or one that does not fit `store`.
        BadInput: replicas give different options; names the first difference.
        SpecConflict: the store has another table of that name.
        Unsupported: the initializer cannot be computed row by row.
    """
    options = {"partition_strategy": partition_strategy, "reduction": reduction}
    _require_options(name, options, optimizer_spec)
    spec = _table_spec(name, shape, dtype, optimizer_spec, initializer, seed)
    rows = _given_rows(spec, initializer)
    group = _own_group() if group is None else group
    described = {
        "name": name,
        "shape": [int(length) for length in shape],
        "dtype": spec.dtype,
        "seed": spec.seed,
        **options,
        "initializer": asdict(spec.initializer) if rows is None else hashlib.blake2b(rows.data).hexdigest(),
        "callbacks": store is not None,
        **({"optimizer": None} if optimizer_spec is None else optimizer_spec.described()),
    }
    require_same(group, f"host embedding {name!r}", described)
    strategy = _strategy(partition_strategy, spec, group.size)
    kind = TokenBuffers if strategy == "TOKEN" else EncodingBuffers
    exchange: RowExchange = kind(group, spec, threads) if store is None else Callbacks(group, spec, store)
    if rows is not None:
        slots = row_optimizer(spec.optimizer).initial_slots(spec.dim)
        exchange.replace(RowBlock(np.arange(len(rows)), rows, np.tile(slots, (len(rows), 1))))
    return HostEmbedding(HostTable(spec, optimizer_spec, exchange, strategy, reduction))


def _require_options(name: str, options: Mapping[str, str], optimizer_spec: object) -> None:
    for option, known in _KNOWN.items():
        if options[option] not in known:
            raise _bad(name, f"{option} {options[option]!r}; known are {', '.join(known)}")
    if not isinstance(optimizer_spec, HostEmbeddingOptimizerSpec | None):
        raise _bad(
            name,
            "optimizer_spec must be a HostEmbeddingOptimizerSpec, or None for an embedding that is not trained; "
            f"got {type(optimizer_spec).__name__}",
        )


def _table_spec(
    name: str,
    shape: Sequence[int],
    dtype: object,
    optimizer_spec: HostEmbeddingOptimizerSpec | None,
    initializer: InitialRows | keras.initializers.Initializer,
    seed: int,
) -> TableSpec:
    lengths = tuple(shape) if isinstance(shape, (Sequence, np.ndarray)) and not isinstance(shape, str) else ()
    if len(lengths) != 2 or not all(isinstance(length, numbers.Integral) and length >= 1 for length in lengths):
        raise _bad(name, f"shape must be [rows, columns], two positive integers, got {shape!r}")
    kind = getattr(dtype, "name", None)  # of NumPy's dtypes and TensorFlow's
    if not isinstance(kind, str):
        kind = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", repr(dtype))
    if kind not in DTYPES:
        raise _bad(name, f"dtype {kind!r}; known dtypes are {', '.join(DTYPES)}")
    if isinstance(initializer, keras.initializers.Initializer):
        seed = seed_of(initializer, seed)
        initial = initializer_spec(name, initializer, int(shape[0]), int(shape[1]))
    elif isinstance(initializer, InitializerSpec):
        initial = initializer
    elif isinstance(initializer, np.ndarray):
        initial = InitializerSpec("zeros")
    elif initializer is None or isinstance(initializer, str):
        initial = InitializerSpec(initializer or "random_uniform")
    else:
        raise _bad(
            name,
            "initializer must be the name of a kind, an InitializerSpec, or an array of the rows; got "
            f"{type(initializer).__name__}",
        )
    return TableSpec(
        name=name,
        dim=int(shape[1]),
        vocabulary_size=int(shape[0]),
        dtype=kind,
        initializer=initial,
        seed=seed,
        optimizer=OptimizerSpec() if optimizer_spec is None else optimizer_spec.optimizer,
    )


def _given_rows(spec: TableSpec, initializer: object) -> Float32 | None:
    """float32 `[rows, columns]`: the initial rows, if they were given as an array."""
    if not isinstance(initializer, np.ndarray):
        return None
    wanted = [spec.vocabulary_size, spec.dim]
    if list(initializer.shape) != wanted or initializer.dtype.kind not in "fiu":
        raise _bad(
            spec.name, f"initial rows must be numbers {wanted}, got {initializer.dtype} {list(initializer.shape)}"
        )
    return np.ascontiguousarray(initializer, np.float32)


def _strategy(asked: str, spec: TableSpec, replicas: int) -> str:
    """ "TOKEN" or "ENCODING", chosen by the cost model for "AUTO"."""
    if asked != "AUTO":
        return asked
    # An optimizer that looks across columns must gather its sums once more where columns are split.
    if row_optimizer(spec.optimizer).cross_column:
        return "TOKEN"
    return choose_strategy(int(spec.vocabulary_size or 0), spec.dim, replicas)


def _bad(name: str, why: str) -> BadSpec:
    return BadSpec(f"host embedding {name!r}: {why}")


@lru_cache(maxsize=1)
def _own_group() -> ReplicaGroup:
    """The group of all processes that MPI started, or of this one alone; the same at every call."""
    return replica_group()


class HostEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """A table in the replicas' own memory, or a store's, as a Keras layer.

    Call it as a layer or use `lookup`: in functional and subclassed models, under `fit` and `tf.function`, and in loops
    with a tape. Every lookup is a collective of all replicas, and so is its gradient: all replicas run the same model
    on the same number of batches, evaluation included.

    Each lookup's gradient is one step of the optimizer. If a model looks the table up k times in a step,
    `accumulation_factor=k` sums them first. `create_host_embedding` makes one.

    Attributes:
        takes_ids: Models with such a layer look at what their integer inputs are given.
    """

    takes_ids = True

    def __init__(self, table: HostTable) -> None:
        super().__init__(name=table.spec.name.replace("/", "_"), dtype="float32")
        self.table = table
        self.supports_jit = False  # XLA compiles no calls to Python
        # A tape computes gradients of variables only: lookups depend on this scalar, whose gradient is zero.
        self._anchor = self.add_weight(
            shape=(), initializer="zeros", name="on_the_way", trainable=table.optimizer is not None
        )
        self.built = True

    @contextmanager
    def register(self) -> Iterator[Self]:
        """`HostTable.register`, around all lookups; models may be built and compiled before."""
        with self.table.register():
            yield self

    def lookup(self, indices: tf.Tensor, clip_indices: bool = True) -> tf.Tensor:
        """The rows of indices.

        Args:
            indices: Integers of any shape: a tensor, an array, lists, or a Keras tensor in a functional model.
            clip_indices: Whether to clip indices to the table.

        Returns:
            A tensor of the table's dtype, the indices' shape + `[columns]`.

        Raises:
            BadIds: the indices are not integers.
            BadInput: the embedding is not registered.
            IdOutOfRange: an index is outside the table and `clip_indices` is False.
            In compiled functions TensorFlow raises its own errors, with these names and messages.
        """
        if any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(indices)):
            return self(indices, clip_indices=clip_indices)
        return self.call(indices, clip_indices)

    def call(self, inputs: tf.Tensor, clip_indices: bool = True) -> tf.Tensor:
        """The rows of indices; see `lookup`."""
        indices = tf.convert_to_tensor(inputs)
        require_integers(self.table.spec.name, indices.dtype.name, indices.dtype.is_integer)
        anchor = tf.convert_to_tensor(self._anchor)
        if not (self.trainable and self.table.optimizer):
            anchor = tf.stop_gradient(anchor)  # computing its gradient would be a training step
        rows = self._differentiable(clip_indices)(indices, anchor)
        return tf.cast(rows, self.table.spec.dtype)

    def compute_output_spec(self, inputs: keras.KerasTensor, clip_indices: bool = True) -> keras.KerasTensor:
        """Shape and dtype of `call`'s result, for functional models."""
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        require_integers(self.table.spec.name, dtype, "int" in dtype)
        return keras.KerasTensor((*inputs.shape, self.table.spec.dim), self.table.spec.dtype)

    def get_embedding_tensor(self) -> Array:
        """`[rows, columns]` of the table's dtype: the current table; every replica calls it."""
        return self.table.whole()

    def state(self) -> State:
        """`HostTable.state`."""
        return self.table.state()

    def restore(self, state: State) -> None:
        """`HostTable.restore`."""
        self.table.restore(state)

    def get_config(self) -> NoReturn:
        """Raises Unsupported: a model file cannot hold a table of the replicas."""
        raise Unsupported(
            f"host embedding {self.table.spec.name!r} cannot be saved in a model file: the replicas hold its rows. "
            "Save its state() and the model's weights (save_weights)"
        )

    def _differentiable(self, clip_indices: bool) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def rows_of(indices: tf.Tensor, anchor: tf.Tensor) -> tf.Tensor:
            rows, ids, counts = self._forward(indices, clip_indices)

            def gradient(upstream: tf.Tensor) -> tuple[None, tf.Tensor]:
                return None, self._backward(ids, counts, tf.convert_to_tensor(upstream), anchor)

            return rows, gradient

        return rows_of  # type: ignore[no-any-return]

    def _forward(self, indices: tf.Tensor, clip_indices: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The rows; and for `_backward` everyone's ids `[total]`, counts and samples `[2, replicas]`."""

        def look_up(given: Array) -> tuple[Float32, Int64, Int64]:
            rows, batch = self.table.lookup_with_ids(given, clip_indices)
            return rows, batch.ids, np.stack([batch.counts, batch.samples])

        if tf.executing_eagerly():
            rows, ids, counts = look_up(indices.numpy())
            return tf.constant(rows), ids, counts
        self._require_threads()
        rows, ids, counts = tf.numpy_function(look_up, [indices], [tf.float32, tf.int64, tf.int64])
        rows.set_shape(indices.shape.concatenate([self.table.spec.dim]))
        ids.set_shape([None])
        counts.set_shape([2, self.table.group.size])
        return rows, ids, counts

    def _backward(self, ids: tf.Tensor, counts: tf.Tensor, upstream: tf.Tensor, anchor: tf.Tensor) -> tf.Tensor:
        """Exchanges and applies the gradient, then returns the anchor's, which is zero."""

        def update(ids: Int64, counts: Int64, gradients: Float32) -> Float32:
            self.table.update(GatheredIds(ids, counts[0], counts[1]), gradients)
            return np.float32(0)  # type: ignore[return-value]

        if tf.executing_eagerly():
            return tf.constant(update(np.asarray(ids), np.asarray(counts), upstream.numpy()))
        zero = tf.numpy_function(update, [ids, counts, upstream], tf.float32)
        zero.set_shape(anchor.shape)
        return zero

    def _require_threads(self) -> None:
        """In compiled functions, replicas in one process wait for each other on shared TensorFlow threads."""
        group = self.table.group
        threads = tf.config.threading.get_inter_op_parallelism_threads() or available_cores()
        if isinstance(group, ThreadGroup) and threads < group.size:
            raise Unsupported(
                f"host embedding {self.table.spec.name!r}: {group.size} replicas in threads of one process wait for "
                f"each other within compiled functions, and TensorFlow has {threads} threads for that; call "
                f"tf.config.threading.set_inter_op_parallelism_threads({group.size}) before its first operation, or "
                "run eagerly"
            )


# A host embedding's state in a safetensors file: whole rows in order, with a checksum


_FORMAT = "elastable host embedding 1"


def save_host_embedding(embedding: "HostEmbedding | HostTable", path: str | os.PathLike[str]) -> None:
    """Writes weights, slots and progress; every replica calls it, and rank 0 writes.

    An existing file is replaced once the new one is complete.

    Args:
        embedding: Registered or not.
        path: The file, by convention with the suffix ".safetensors".

    Raises:
        CheckpointError: the file cannot be written (StoreFailed with the reason, on other replicas).
    """
    table = _table(embedding)
    state = table.state()
    with fail_together(table.group):
        if table.group.rank == 0:
            _write(Path(path), table.spec.name, state)


def load_host_embedding(embedding: "HostEmbedding | HostTable", path: str | os.PathLike[str]) -> None:
    """Loads what `save_host_embedding` wrote; every replica calls it and reads the file.

    Raises:
        CheckpointError: the file is missing, damaged, or not of a host embedding; nothing has changed.
        BadInput: it is the state of another table; names the difference. Nothing has changed.
        StoreFailed: another replica could not read it; names the rank.
    """
    table = _table(embedding)
    with fail_together(table.group):
        state = _read(Path(path))
    table.restore(state)


def _table(embedding: "HostEmbedding | HostTable") -> HostTable:
    return embedding if isinstance(embedding, HostTable) else embedding.table


def _write(path: Path, name: str, state: State) -> None:
    tensors = {key: [values] for key, values in state.items()}
    note = {"format": _FORMAT, "name": name, "blake2b": _checksum(state)}
    draft = path.with_name(f".{path.name}.writing")
    try:
        draft.unlink(missing_ok=True)
        LocalFiles(path.parent).write(draft.name, parts_of(tensors, note))
        draft.replace(path)
    except OSError as error:
        raise CheckpointError(f"host embedding {name!r} cannot be written to {path}: {error}") from error


def _read(path: Path) -> State:
    try:
        tensors, note = tensors_in(LocalFiles(path.parent).read(path.name))
    except (OSError, ValueError) as failure:
        raise CheckpointError(f"{path} cannot be read as a host embedding: {failure}") from failure
    if note.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a host embedding: its format is {note.get('format')!r}")
    if _checksum(tensors) != note.get("blake2b"):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return dict(tensors)


def _checksum(state: State) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        digest.update(f"{name} {state[name].dtype} {state[name].shape};".encode())
        digest.update(np.ascontiguousarray(state[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
