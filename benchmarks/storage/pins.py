"""The cost of a pin: commits with a pin compared with commits without, and lookups at a pinned version.

Commits of 65,536 ids (unique, or the different ones of as many Zipf ids) over 2
million rows of 64 values in memory. Every eight commits a new pin is taken, so
that nearly all unique ids change for the first time since: the highest cost of
a pin. Lookups are of a version followed by 24 commits, which have changed half
of the table.

    python -m benchmarks.storage.pins
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, versus
from benchmarks.peers import workloads
from benchmarks.tables.table_work import fill
from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.process.heap import keep_freed_memory

ROWS, DIM, BATCH = workloads.ROWS, workloads.DIM, workloads.BATCH
_COMMITS = 8  # per pin
_GRADIENTS = 4
_ROUNDS = 9
_PINNED_BYTES = 4 << 30

Updates = Iterator[TableUpdate]


def main() -> None:
    """Measures, prints and writes `results/pins.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    rows: list[Row] = []
    for optimizer in ("adagrad", "adam"):
        for kind, batches in (("unique", workloads.unique()), ("Zipf(1.05)", workloads.zipf())):
            with _filled(optimizer) as store:
                rows.append(_commits(f"{optimizer}, {kind} ids", store, _updates(batches)))
                if kind == "unique":
                    rows.append(_lookups(optimizer, store, _updates(batches)))
    publish("pins", f"Pins: {BATCH:,} ids of {ROWS:,} rows x {DIM}, {workloads.THREADS} threads", rows)


def _commits(name: str, store: MemoryStore, updates: Updates) -> Row:
    def pace(pinned: bool) -> Callable[[], float]:
        def measure() -> float:
            pin = store.pin() if pinned else None
            began, done = time.perf_counter(), 0
            for _ in range(_COMMITS):
                done += _commit(store, next(updates))
            took = time.perf_counter() - began
            if pin is not None:
                pin.close()
            return done / took

        return measure

    figures = interleaved({"pinned": pace(True), "free": pace(False)}, _ROUNDS)
    return compare(f"commits with a pin, {name}, vs. without", "ids/s", figures["pinned"], figures["free"])


def _lookups(optimizer: str, store: MemoryStore, updates: Updates) -> Row:
    with store.pin() as pin:
        for _ in range(24):
            _commit(store, next(updates))
        wanted = workloads.uniform()
        pinned, current = cycle(wanted), cycle(wanted)
        return versus(
            f"lookups at a pinned version, {optimizer}, half of the rows changed, vs. the current one",
            "ids/s",
            lambda: store.lookup({"t": next(pinned)}, pin.version()),
            lambda: store.lookup({"t": next(current)}),
            BATCH,
            _ROUNDS,
            at_least_s=0.1,
        )


def _commit(store: MemoryStore, update: TableUpdate) -> int:
    version = store.version()
    store.commit(Commit(version + 1, {"t": update}, version, {}))
    return len(update.ids)


def _updates(batches: list[workloads.Int64]) -> Updates:
    random = np.random.default_rng(2)
    gradients = cycle([random.standard_normal((BATCH, DIM), np.float32) for _ in range(_GRADIENTS)])
    for ids in cycle([random.permutation(np.unique(batch)) for batch in batches]):
        yield TableUpdate(ids, next(gradients)[: len(ids)])


@contextmanager
def _filled(optimizer: str) -> Iterator[MemoryStore]:
    """A store whose table has values of its own in all rows."""
    with MemoryStore(workloads.THREADS, direct_bytes=1 << 33, before_image_bytes=_PINNED_BYTES) as store:
        fill(store, TableSpec("t", DIM, ROWS, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01)))
        yield store


if __name__ == "__main__":
    main()
