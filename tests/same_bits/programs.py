"""The jobs that are programs: `python -m tests.same_bits.programs NAME HOME`, which each replica of them runs."""

import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

import elastable as et
from elastable.embedding_store import IndexedSlices, convert_table, update_many
from tests.same_bits.arrays import Arrays, nudged, require_own_tree, table_arrays
from tests.untyped import Keyword, Keywords


def _stored(store: object, *tables: str) -> Arrays:
    arrays: Arrays = {}
    for table in tables:
        arrays |= table_arrays(table, store.scan(table))  # type: ignore[attr-defined]
    return arrays


def _fitted(model: keras.Model, x: object, y: np.ndarray, tables: tuple[str, ...], **more: Keyword) -> Arrays:
    """Losses, rows, slots, dense weights and predictions of `et.fit`."""
    store = et.MemoryStore()
    history = et.fit(model, x, y, store=store, batch_size=16, epochs=2, seed=4, verbose=0, **more)
    arrays = {f"history/{name}": np.array(values) for name, values in history.history.items()}
    for layer in model.layers:
        if not isinstance(layer, et.Embedding):
            arrays |= {f"{layer.name}/{number}": value for number, value in enumerate(layer.get_weights())}
    return arrays | _stored(store, *tables) | {"predictions": model.predict(x, batch_size=32, verbose=0)}


def tables(_: object) -> Arrays:
    """Tables without a model: optimizers, bags and their gradients, dtypes, admission, eviction, shards, int8."""
    random = np.random.default_rng(3)
    common: Keywords = {"vocabulary_size": 40, "initializer": et.InitializerSpec("normal", 0.0, 0.05)}
    specs = [
        et.TableSpec("adam", 6, optimizer=et.OptimizerSpec.of("adam", lazy=False, learning_rate=0.01), **common),
        et.TableSpec("half", 8, dtype="bfloat16", optimizer=et.OptimizerSpec.of("adagrad", learning_rate=0.1)),
        et.TableSpec("row-wise", 5, optimizer=et.OptimizerSpec.of("rowwise_adagrad"), **common),
        et.TableSpec(
            "members",
            4,
            optimizer=et.OptimizerSpec.of("ftrl", learning_rate=0.1),
            admission=et.AdmissionSpec(2, 1 << 10),
            eviction=et.EvictionSpec(max_rows=12, every=3),
        ),
    ]
    found: Arrays = {}
    for url in ("memory", "encoding:memory,memory"):
        with et.open_store(url) as store:
            made = [store.table(spec) for spec in specs]
            for _step in range(9):
                ids = [random.integers(0, 40, (10, 3)) for _table in made]
                ups = [nudged(random.normal(size=(10, table.dim))) for table in made]
                slices = [
                    table.lookup_gradient(some, up, combiner="sqrtn")
                    for table, some, up in zip(made, ids, ups, strict=True)
                ]
                update_many(made, None, slices)
            made[0].update(None, IndexedSlices(np.ones((3, 6), np.float32), np.array([1, 2, 1])))
            looked = {f"bags of {table.name}": table.lookup(ids[0], combiner="mean") for table in made}
            arrays = looked | _stored(store, *(table.name for table in made))
            served = et.MemoryStore()
            convert_table(store, "adam", served, "int8")
            arrays |= {f"int8/{name}": value for name, value in _stored(served, "adam").items()}
            found |= {f"{url}/{name}": value for name, value in arrays.items()}
    return found


def masks(_: object) -> Arrays:
    """Masked steps of sequences, which are divided by what is not masked, with `grads_to_wait=3`."""
    random = np.random.default_rng(8)
    ids = random.integers(1, 20, (144, 5)) * (np.arange(5) < random.integers(1, 6, (144, 1)))
    words = keras.Input((5,), dtype="int64")
    steps = keras.layers.SimpleRNN(6, return_sequences=True)(et.Embedding(20, 4, mask_zero=True, name="words")(words))
    model = keras.Model(words, keras.layers.TimeDistributed(keras.layers.Dense(1))(steps))
    model.compile(keras.optimizers.Adagrad(0.1), "mse", metrics=["mae"])
    target = nudged(2.0 + random.normal(size=(144, 5, 1)))
    return _fitted(model, ids, target, ("words",), grads_to_wait=3, shuffle=False)


def dlrm(_: object) -> Arrays:
    """Numbers through one tower, bags of several tables and their products through another."""
    random = np.random.default_rng(9)
    count = 128
    sizes = random.integers(0, 5, count)
    splits = np.concatenate([[0], np.cumsum(sizes)])
    x = {
        "numbers": random.normal(size=(count, 3)).astype(np.float32),
        "items": random.integers(0, 40, (count, 3)),
        "tags": tf.RaggedTensor.from_row_splits(random.integers(0, 25, splits[-1]), splits),
    }
    numbers = keras.Input((3,), name="numbers")
    items = keras.Input((3,), dtype="int64", name="items")
    tags = keras.Input((None,), dtype="int64", name="tags", ragged=True)
    bottom = keras.layers.Dense(6, "relu")(numbers)
    bags = [
        et.Embedding(40, 6, combiner="sum", name="items-once", table="items-of")(items),
        et.Embedding(None, 6, combiner="sqrtn", name="tags-of")(tags),
        et.Embedding(40, 6, combiner="mean", name="items-again", table="items-of")(items),
    ]
    pairs = [keras.layers.Dot(axes=1)([one, bottom]) for one in bags]
    top = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()([bottom, *bags, *pairs]))
    model = keras.Model({"numbers": numbers, "items": items, "tags": tags}, keras.layers.Dense(1)(top))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return _fitted(model, x, nudged(2.0 + random.normal(size=(count, 1))), ("items-of", "tags-of"))


def host_embeddings(home: Path) -> Arrays:
    """One table after another: by callback to a store, and by remote buffer with each strategy."""
    group = et.replica_group()
    random = np.random.default_rng(2)
    x, y = random.integers(0, 20, (60, 3)), nudged(2.0 + random.normal(size=(60, 1)))
    found: Arrays = {}
    for way in ("callback", "TOKEN", "ENCODING"):
        keras.utils.set_random_seed(1)
        more: Keywords = {"store": et.open_store((home / "address").read_text())} if way == "callback" else {}
        strategy, optimizer = "TOKEN" if way == "callback" else way, et.HostEmbeddingOptimizerSpec(0.05, "adagrad")
        host = et.create_host_embedding(
            f"rows-{way}", (20, 5), np.float32, strategy, optimizer, "uniform", group=group, **more
        )
        ids = keras.Input((3,), dtype="int64")
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(host.lookup(ids))))
        trainer = et.ReplicaTrainer(model, group=group)
        trainer.compile(keras.optimizers.Adagrad(0.05), "mse")
        with host.register():
            history = trainer.fit(x, y, batch_size=15, epochs=2, shuffle=False, verbose=0)
            et.save_host_embedding(host, home / f"{way}.safetensors")
            found[f"{way}/rows"] = host.get_embedding_tensor()
        found[f"{way}/kernel"] = np.asarray(model.layers[-1].kernel)
        found[f"{way}/loss"] = np.array(history.history["loss"])
        group.barrier()  # the first replica writes the file
        found |= {f"{way}/{key}": value for key, value in load_file(home / f"{way}.safetensors").items()}
    return found


def sharded(home: Path) -> Arrays:
    """Weights and Adam's state split over the replicas."""
    group = et.replica_group()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(9, "tanh"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(1)]
    )
    part = et.TensorLocationSettings(
        et.TensorLocation(replicated_tensor_sharding=True), min_elements_for_replicated_tensor_sharding=1
    )
    trainer = et.ReplicaTrainer(model, et.LocationSettings(weight=part, optimizer_state=part), group)
    trainer.compile(keras.optimizers.Adam(0.02, global_clipnorm=1.0), "mse", metrics=["mae"])
    random = np.random.default_rng(6)
    x, y = random.normal(size=(90, 6)).astype(np.float32), nudged(2.0 + random.normal(size=(90, 1)))
    history = trainer.fit(x, y, batch_size=30, epochs=3, validation_split=0.1, verbose=0)
    arrays = {f"history/{name}": np.array(values) for name, values in history.history.items()}
    return arrays | {f"weights/{number}": value for number, value in enumerate(model.get_weights())}


_PROGRAMS: dict[str, Callable[[Path], Arrays]] = {
    "tables": tables,
    "masks": masks,
    "dlrm": dlrm,
    "host-embeddings": host_embeddings,
    "sharded": sharded,
}


def main(name: str, home: Path) -> None:
    """Runs one of them as one of its replicas."""
    require_own_tree()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(7)
    arrays = _PROGRAMS[name](home)
    rank = et.replica_group().rank
    np.savez(home / f"rank-{rank}.npz", **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
