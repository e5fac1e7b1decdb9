"""Updates with `lazy=False`, compared with lazy updates and with Keras, which steps the whole table.

A table of 2 million rows of 64 values; 24 different batches of ids in turn, so
that each touched row has missed between 1 and some dozen steps. Updates are
commits; lookups are of rows that have missed steps. Then the same with replay
epochs (see `elastable.embedding_store.optimizers.dense_replay.table_steps`)
that end so often that all rows have missed some steps.

    python -m benchmarks.tables.catch_up
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Row, Work, publish, versus
from benchmarks.peers import workloads
from benchmarks.tables.table_work import fill, look_up
from elastable.embedding_store import Commit, EmbeddingTable, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.process.heap import keep_freed_memory

ROWS, DIM, BATCH = workloads.ROWS, workloads.DIM, workloads.BATCH
_SMALL = 4096
_ROUNDS = 9
_TURN = 24  # commits after which a batch comes again
_REPLAY_EPOCHS = 1, 4, 24  # that have ended by then
_OPTIMIZERS: dict[str, dict[str, float]] = {
    "adam": {},
    "adamw": {"weight_decay": 0.01},
    "sgd": {"momentum": 0.9},
    "rmsprop": {"momentum": 0.9},
}


def main() -> None:
    """Measures, prints and writes `results/catch_up.json`."""
    keep_freed_memory()
    rows = [row for name, settings in _OPTIMIZERS.items() for row in _vs_lazy(name, settings, BATCH)]
    rows += [*_vs_lazy("adam", {}, _SMALL), _vs_keras()]
    rows += [row for replay_epochs in _REPLAY_EPOCHS for row in _with_replay_epochs(replay_epochs)]
    title = f"Rows that follow every step: {ROWS:,} rows x {DIM}, {workloads.THREADS} threads"
    publish("catch_up", title, rows)


def _vs_lazy(name: str, settings: dict[str, float], batch: int) -> list[Row]:
    case = f"{name}{''.join(f', {key}={value:g}' for key, value in settings.items())}, {batch:,} different ids"
    pairs = tuple(sorted({"learning_rate": 1e-3, **settings}.items()))
    with _filled(OptimizerSpec(name, pairs)) as lazy, _filled(OptimizerSpec(name, pairs, lazy=False)) as following:
        return _compared(f"lazy=False vs. lazy: {case}", following, lazy, batch)


def _with_replay_epochs(replay_epochs: int) -> list[Row]:
    """Rows that have missed up to this many replay epochs, compared with rows that have missed steps of one."""
    plural = "s" if replay_epochs > 1 else ""
    case = f"adam, {BATCH:,} different ids, behind by up to {replay_epochs} replay epoch{plural}"
    optimizer = OptimizerSpec.of("adam", lazy=False, learning_rate=1e-3)
    every = _TURN // replay_epochs
    with _filled(optimizer) as one, _filled(optimizer) as many:
        turn = _updates(many, BATCH, every)
        for _ in range(_TURN):
            turn()
        return _compared(f"with replay epochs vs. without: {case}", many, one, BATCH, every)


def _compared(case: str, ours: EmbeddingTable, theirs: EmbeddingTable, batch: int, replay_epoch: int = 0) -> list[Row]:
    works = {
        "update": (_updates(ours, batch, replay_epoch), _updates(theirs, batch)),
        "lookup": (look_up(ours, _ids(batch)), look_up(theirs, _ids(batch))),
    }
    return [
        versus(f"{what}, {case}", "ids/s", one, other, batch, _ROUNDS, at_least_s=0.1)
        for what, (one, other) in works.items()
    ]


def _vs_keras() -> Row:
    """Keras' dense Adam, whose step reads and writes every row of the table."""
    name = f"update, lazy=False vs. Keras' dense Adam, {BATCH:,} different ids"
    with _filled(OptimizerSpec.of("adam", lazy=False, learning_rate=1e-3)) as table:
        return versus(name, "ids/s", _updates(table, BATCH), _keras_steps(), BATCH, 3)


def _keras_steps() -> Work:
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(workloads.THREADS)
    table = keras.Variable(np.ones((ROWS, DIM), np.float32))
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build([table])

    @tf.function  # type: ignore[untyped-decorator]
    def step(ids: tf.Tensor, values: tf.Tensor) -> None:
        optimizer.apply([tf.IndexedSlices(values, ids, (ROWS, DIM))], [table])

    turns, gradients = _turns(BATCH)
    return lambda: step(tf.constant(next(turns)), tf.constant(next(gradients)))


def _ids(batch: int) -> list[npt.NDArray[np.int64]]:
    return [some[:batch].copy() for some in workloads.unique()]


def _turns(batch: int) -> tuple[Iterator[npt.NDArray[np.int64]], Iterator[npt.NDArray[np.float32]]]:
    random = np.random.default_rng(1)
    return cycle(_ids(batch)), cycle([random.standard_normal((batch, DIM), np.float32) for _ in range(4)])


def _updates(table: EmbeddingTable, batch: int, replay_epoch: int = 0) -> Work:
    """Commits; `replay_epoch`: how many of them make one, 0: none ends."""
    (turns, gradients), store = _turns(batch), table.store

    def work() -> None:
        version = store.version()
        ends = replay_epoch > 0 and version % replay_epoch == 0
        update = TableUpdate(next(turns), next(gradients))
        store.commit(Commit(version + 1, {"t": update}, version, {}, ends_replay_epoch=ends))

    return work


@contextmanager
def _filled(optimizer: OptimizerSpec) -> Iterator[EmbeddingTable]:
    """A table of which all rows hold values of their own, after a round of updates."""
    with MemoryStore(workloads.THREADS, direct_bytes=1 << 33) as store:
        table = fill(store, TableSpec("t", DIM, ROWS, optimizer=optimizer))
        work = _updates(table, BATCH)
        for _ in range(_TURN):
            work()
        yield table


if __name__ == "__main__":
    main()
