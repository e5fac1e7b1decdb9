"""File tier compared with memory tier under skewed traffic.

Ids follow Zipf(1.05) over all rows of a table of 2 million rows of 64 values,
in an order independent of the ids. The file store's budget is a quarter of its
files, weights and slots; the memory of the process is measured before and
after. Commits are measured without a log, which shows the engine and the tier,
and with one, whose entries hold every changed row: no log can be faster than
writing as many bytes to a file that need never be on the disk.

    python -m benchmarks.storage.tiers
"""

import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import BinaryIO

import numpy as np

from benchmarks.harness import Rounds, Row, Work, compare, publish, rates
from benchmarks.peers import workloads
from benchmarks.processes import own_memory
from benchmarks.tables.table_work import commit, fill, look_up, updates_of
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH, _SKEW = workloads.ROWS, workloads.DIM, workloads.BATCH, 1.05
_IDS = 4_000_000  # looked up before any batch comes again: fewer, and a cache would know them by heart
_ROUNDS, _OUTPUTS = 7, 8  # in turn, so that they lie in memory and not in a cache
_SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2}  # values per weight
_TOGETHER = 8  # commits that are timed as one: what one of them in several waits for counts, too
_ENTRIES = 16  # in a file that is written anew
_MIB = 1 << 20


def main() -> None:
    """Measures, prints and writes `results/tiers.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tiers-") as home:
        for optimizer in ("adagrad", "sgd", "adam"):
            (folder := Path(home) / optimizer).mkdir()
            rows += _file_tier(folder, optimizer)
    title = f"Tiers: {_BATCH:,} ids, Zipf({_SKEW}), rows x {_DIM}"
    publish("tiers", title, rows)


def _file_tier(folder: Path, optimizer: str) -> list[Row]:
    width = _DIM * (1 + _SLOTS[optimizer])
    budget = 4 * _ROWS * width // 4
    batches = workloads.zipf(_SKEW, _IDS // _BATCH)
    updates = updates_of(batches[:24], np.random.default_rng(7).standard_normal((_BATCH, _DIM), dtype=np.float32))
    with MemoryStore() as memory:
        _filled(memory, optimizer)
        # Memory that results take is taken before, and used again.
        del [memory.lookup({"t": batch}) for batch in batches[:3]][:]
        before = own_memory()
        with open_store(f"file://{folder / 'unlogged'}?budget={budget}&log=none") as files:
            _filled(files, optimizer)
            _warm(files, batches)
            grown = own_memory() - before
            np.testing.assert_array_equal(files.lookup({"t": batches[0]})["t"], memory.lookup({"t": batches[0]})["t"])
            tables = {"file": files.table("t"), "memory": memory.table("t")}
            lookups = {kind: look_up(table, batches, _OUTPUTS) for kind, table in tables.items()}
            looked = rates(lookups, _BATCH, _ROUNDS)
            plain = commit(memory, updates)
            committed = _commits({"file": commit(files, updates), "memory": plain}, updates)
        with (
            open_store(f"file://{folder / 'logged'}?budget={budget}") as logged,
            (folder / "bytes").open("wb", buffering=0) as file,
        ):
            _filled(logged, optimizer)
            _warm(logged, batches)
            size = 8 + 4 * width  # of a row and its id
            works = {"logged": commit(logged, updates), "memory": plain}
            with_log = _commits({**works, "bytes": _writing(file, size * len(updates[0].ids))}, updates)
    name = f"file tier, {optimizer}, budget a quarter of {4 * _ROWS * width // _MIB} MiB"
    alone = with_log["memory"]
    return [
        compare(f"lookup, {name}, against memory", "rows/s", looked["file"], looked["memory"], 0.65),
        compare(f"commit, {name}, no log, against memory", "rows/s", committed["file"], committed["memory"], 0.6),
        compare(f"commit, {name}, its own log, against memory", "rows/s", with_log["logged"], alone),
        compare(f"writing the bytes of its log, {name}, against memory", "rows/s", with_log["bytes"], alone),
        Row.at_most(f"memory of its own, {name}, against the budget", grown / _MIB, "MiB", budget / _MIB),
    ]  # fmt: skip


def _commits(works: Mapping[str, Work], updates: list[TableUpdate]) -> Rounds:
    """Rows/s of what commits the updates."""
    amount = _TOGETHER * float(np.median([len(update.ids) for update in updates]))
    for work in works.values():
        _repeat(work, 2 * len(updates))
    return rates({name: partial(_repeat, work, _TOGETHER) for name, work in works.items()}, amount, _ROUNDS)


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def _writing(file: BinaryIO, size: int) -> Work:
    """Writes so many bytes each time, again and again to the same pages of the system's cache."""
    entries = cycle([np.random.default_rng(seed).bytes(size) for seed in range(4)])
    numbers = cycle(range(_ENTRIES))

    def work() -> None:
        if next(numbers) == 0:
            file.seek(0)
        file.write(next(entries))

    return work


def _filled(store: EmbeddingStore, optimizer: str) -> EmbeddingTable:
    """A table "t" that has all its rows."""
    spec = TableSpec("t", _DIM, _ROWS, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01))
    return fill(store, spec, random=np.random.default_rng(1))


def _warm(store: EmbeddingStore, batches: list[Int64]) -> None:
    for batch in batches * 3:
        store.lookup({"t": batch})


if __name__ == "__main__":
    main()
