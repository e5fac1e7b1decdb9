"""Exports a trained model as a plain Keras model that runs without Elastable."""

import sys
from collections import defaultdict
from pathlib import Path

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.tables.row_blocks import fresh_rows
from elastable.master.backend.contract import backend
from elastable.worker.layers.distributed_embedding import DistributedEmbedding
from elastable.worker.layers.embedding import Embedding
from elastable.worker.rows.saved_rows import writing_tables_of
from elastable.worker.rows.store_backed import StoreBacked
from elastable.worker.user_model.offload import OffloadedEmbedding

_BLOCK_ROWS = 1 << 16


def export_keras(model: keras.Model, store: EmbeddingStore, path: str | Path) -> Path:
    """Writes `model` with its tables as a `.keras` file that loads without Elastable.

    A model whose only tables are offloaded Keras layers may be of any kind; loading a subclassed one needs its class.

    Raises:
        Unsupported: see `plain_model`.
    """
    file = Path(path)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, StoreBacked)]
    if not _is_functional(model) and layers and all(isinstance(layer, OffloadedEmbedding) for layer in layers):
        for layer in layers:
            layer.attach(store)
        with writing_tables_of(sys.maxsize):
            model.save(file)
        return file
    plain_model(model, store).save(file)
    return file


def _is_functional(model: keras.Model) -> bool:
    # Keras' Functional has no public name; it has the operations between inputs and outputs.
    return isinstance(model, keras.Sequential) or isinstance(getattr(type(model), "operations", None), property)


def plain_model(model: keras.Model, store: EmbeddingStore) -> keras.Model:
    """The same Functional or Sequential model with plain Keras layers only.

    A fixed table becomes a `keras.layers.Embedding` of all its rows. A table of any int64 ids becomes an
    `IntegerLookup` over the ids that were trained, and an `Embedding` of their rows; untrained ids share one row, the
    mean of the initial distribution, where the store would give each its own initial value.

    Raises:
        Unsupported: a subclassed model, sparse or ragged ids, layers that share a table and differ, or what Keras
            cannot clone.
    """
    if not _is_functional(model):
        raise Unsupported(
            f"model {model.name!r} is a subclass of keras.Model, whose et.Embedding layers Keras cannot replace; write "
            "a SavedModel with model.export(path, input_signature=...), or model.save for where Elastable is installed"
        )
    pairs: list[tuple[keras.Layer, keras.Layer]] = []
    shared: dict[str, keras.layers.Embedding] = {}
    homes = _worker_tables(model)
    _refuse_shared(model)

    def clone(layer: keras.Layer) -> keras.Layer:
        if isinstance(layer, StoreBacked):
            return _plain_layer(layer, homes.get(layer.table_name, store), shared)
        if isinstance(layer, DistributedEmbedding):
            raise Unsupported(
                f"layer {layer.name!r}: plain Keras has no layer of several tables; save the model with "
                "model.save, which loads where Elastable is installed, or use one et.Embedding a feature, with the "
                "same table= where features share one"
            )
        copy = layer.__class__.from_config(layer.get_config())
        pairs.append((layer, copy))
        return copy

    try:
        plain = keras.models.clone_model(model, clone_function=clone, recursive=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Unsupported(
            f"model {model.name!r}: Keras cannot make its layers anew ({error}); write a SavedModel with "
            "model.export(path)"
        ) from error
    for layer, copy in pairs:
        if getattr(layer, "weights", None):
            copy.set_weights(layer.get_weights())
    for table, layer in shared.items():
        home = homes.get(table, store)
        layer.set_weights([_table_values(home, home.specs()[table])])
    if config := getattr(model, "compiled", False) and model.get_compile_config():
        plain.compile_from_config(config)
    return plain


def _worker_tables(model: keras.Model) -> dict[str, EmbeddingStore]:
    """Tables on the worker, each copied to a store: table name -> store."""
    homes: dict[str, EmbeddingStore] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, StoreBacked) and layer.on_worker and layer.table_name not in homes:
            spec, rows, home = layer.table_spec(), layer.worker_rows(), MemoryStore()
            home.create_table(spec)
            home.put(spec.name, [fresh_rows(spec, np.arange(len(rows), dtype=np.int64), rows)])
            homes[spec.name] = home
    return homes


def _refuse_shared(model: keras.Model) -> None:
    """Raises `Unsupported` for layers that share a table and are no one `keras.layers.Embedding` in plain Keras."""
    sharing = defaultdict[str, list[Embedding]](list)
    for layer in model._flatten_layers():
        if isinstance(layer, Embedding):
            sharing[layer.table_name].append(layer)
    for table, layers in sharing.items():
        first = layers[0]
        alike = all((each.combiner, each.mask_zero) == (None, first.mask_zero) for each in layers)
        if len(layers) > 1 and (first.input_dim is None or not alike):
            raise Unsupported(
                f"embedding layers {', '.join(each.name for each in layers)} share the table {table!r}, and Keras can "
                "load no file of that unless all have input_dim, no combiner and the same mask_zero; write a "
                "SavedModel with model.export(path), or model.save for where Elastable is installed"
            )


def _plain_layer(layer: keras.Layer, store: EmbeddingStore, shared: dict[str, keras.layers.Embedding]) -> keras.Layer:
    spec = store.specs()[layer.table_name]
    if isinstance(layer, OffloadedEmbedding):
        shared[spec.name] = keras.layers.Embedding.from_config(layer.get_config())
        return shared[spec.name]
    if spec.ids != "int64":
        raise Unsupported(
            f"embedding layer {layer.name!r}: hashes strings to ids of 64 bits, which plain Keras cannot; save "
            "checkpoints, or put keras.layers.StringLookup in front of it"
        )
    simple = layer.combiner is None and spec.vocabulary_size is not None
    if spec.name not in shared:
        shared[spec.name] = keras.layers.Embedding(
            spec.vocabulary_size or len(_trained_ids(store, spec.name)) + 2,
            spec.dim,
            embeddings_initializer="zeros",
            mask_zero=layer.mask_zero and layer.combiner is None,
            name=layer.name if simple else f"{layer.name}_rows",
        )
        shared[spec.name].build()
    if simple:
        return shared[spec.name]
    # A small functional model replaces a layer without a plain Keras equivalent.
    ids = _symbolic_ids(layer)
    positions = ids if spec.vocabulary_size is not None else _positions(ids, layer, _trained_ids(store, spec.name))
    rows = shared[spec.name](positions)
    return keras.Model(ids, rows if layer.combiner is None else _reduced(rows, ids, layer), name=layer.name)


def _positions(ids: keras.KerasTensor, layer: keras.Layer, trained: Int64) -> keras.KerasTensor:
    """The row of each id: 0 of id 0, which may be padding; 1 of those that were not trained."""
    if not len(trained):  # Keras has no empty vocabulary
        return keras.ops.cast(keras.ops.not_equal(ids, 0), "int64")
    # Keras needs an "unknown" token that is not an id; it never reaches the model.
    if not backend().has_graphs:
        raise Unsupported(
            f"embedding layer {layer.name!r}: a plain Keras model finds the rows of any int64 id by an IntegerLookup, "
            f"which is TensorFlow's, and Keras runs on {backend().name}: give the layer input_dim, or export the "
            "checkpoint with KERAS_BACKEND=tensorflow"
        )
    known = set(trained.tolist())
    unused = next(token for token in range(-1, -2 - len(trained), -1) if token not in known)
    lookup = keras.layers.IntegerLookup(
        vocabulary=trained.tolist(), num_oov_indices=1, mask_token=0, oov_token=unused, name=f"{layer.name}_ids"
    )
    return lookup(ids)


def _symbolic_ids(layer: Embedding) -> keras.KerasTensor:
    given = layer.input
    if not isinstance(given, keras.KerasTensor) or given.sparse or getattr(given, "ragged", False):
        raise Unsupported(
            f"embedding layer {layer.name!r}: a plain Keras embedding takes one dense tensor of ids; "
            "sparse, ragged and weighted ids cannot be exported to .keras"
        )
    return keras.Input(given.shape[1:], dtype=given.dtype, name=f"{layer.name}_input")


def _reduced(rows: keras.KerasTensor, ids: keras.KerasTensor, layer: Embedding) -> keras.KerasTensor:
    ops = keras.ops
    if not layer.mask_zero:
        length = ids.shape[-1]
        if layer.combiner == "sum":
            return ops.sum(rows, axis=-2)
        if layer.combiner == "mean":
            return ops.mean(rows, axis=-2)
        if length is None:
            raise Unsupported(f"embedding layer {layer.name!r}: sqrtn over an open number of ids cannot be exported")
        return ops.sum(rows, axis=-2) / float(length) ** 0.5
    kept = ops.cast(ops.not_equal(ids, 0), "float32")
    total = ops.sum(rows * ops.expand_dims(kept, -1), axis=-2)
    if layer.combiner == "sum":
        return total
    count = ops.sum(kept, axis=-1, keepdims=True)
    norm = count if layer.combiner == "mean" else ops.sqrt(count)
    return total / ops.maximum(norm, 1e-30)


def _trained_ids(store: EmbeddingStore, table: str) -> Int64:
    """Without id 0, sorted."""
    blocks = [block.ids for block in store.scan(table)]
    return np.setdiff1d(np.concatenate([np.zeros(0, np.int64), *blocks]), [0])


def _table_values(store: EmbeddingStore, spec: TableSpec) -> Float32:
    """float32 `[vocabulary, dim]`; in a dynamic table row 0 is that of id 0, row 1 that of unknown ids."""
    if spec.vocabulary_size is not None:
        return _rows_of(store, spec, np.arange(spec.vocabulary_size, dtype=np.int64))
    first = spec.initializer
    means = {"zeros": 0.0, "ones": 1.0, "uniform": (first.a + first.b) / 2}
    unknown = means.get(first.kind, first.a)
    trained, unseen = _rows_of(store, spec, _trained_ids(store, spec.name)), np.full((1, spec.dim), unknown, np.float32)
    zero = store.read_rows(spec.name, np.zeros(1, np.int64)).weights
    return np.concatenate([zero if len(zero) else unseen, unseen, trained])


def _rows_of(store: EmbeddingStore, spec: TableSpec, ids: Int64) -> Float32:
    rows = np.empty((len(ids), spec.dim), np.float32)
    for start in range(0, len(ids), _BLOCK_ROWS):
        block = ids[start : start + _BLOCK_ROWS]
        rows[start : start + len(block)] = store.lookup({spec.name: block})[spec.name]
    return rows
