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
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import BinaryIO

import numpy as np

from benchmarks.harness import Rounds, Row, compare, interleaved, publish, rate
from benchmarks.processes import own_memory
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.open_store import open_store
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH, _SKEW = 2_000_000, 64, 65_536, 1.05
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
    batches = _zipf(_ROWS, _BATCH)
    updates = _updates(batches)
    with MemoryStore() as memory, _filled(memory, _ROWS, optimizer):
        # Memory that results take is taken before, and used again.
        del [memory.lookup({"t": batch}) for batch in batches[:3]][:]
        before = own_memory()
        with open_store(f"file://{folder / 'unlogged'}?budget={budget}&log=none") as files:
            _filled(files, _ROWS, optimizer)
            _warm(files, batches)
            grown = own_memory() - before
            np.testing.assert_array_equal(files.lookup({"t": batches[0]})["t"], memory.lookup({"t": batches[0]})["t"])
            looked = _lookups(files, memory, batches)
            turns = {"file": _committing(files, updates), "memory": _committing(memory, updates)}
            committed = _commits(turns, updates)
        with (
            open_store(f"file://{folder / 'logged'}?budget={budget}") as logged,
            (folder / "bytes").open("wb", buffering=0) as file,
        ):
            _filled(logged, _ROWS, optimizer)
            _warm(logged, batches)
            size = 8 + 4 * width  # of a row and its id
            turns = {"logged": _committing(logged, updates), "memory": turns["memory"]}
            with_log = _commits({**turns, "bytes": _writing(file, size * len(updates[0].ids))}, updates)
    name = f"file tier, {optimizer}, budget a quarter of {4 * _ROWS * width // _MIB} MiB"
    plain = with_log["memory"]
    return [
        compare(f"lookup, {name}, against memory", "rows/s", looked["file"], looked["memory"], 0.65),
        compare(f"commit, {name}, no log, against memory", "rows/s", committed["file"], committed["memory"], 0.6),
        compare(f"commit, {name}, its own log, against memory", "rows/s", with_log["logged"], plain),
        compare(f"writing the bytes of its log, {name}, against memory", "rows/s", with_log["bytes"], plain),
        Row(f"memory of its own, {name}, against the budget", grown / _MIB, "MiB", budget / _MIB, budget / grown, 1.0),
    ]  # fmt: skip


def _lookups(files: EmbeddingStore, memory: MemoryStore, batches: list[Int64]) -> Rounds:
    outputs = cycle([np.zeros((_BATCH, _DIM), np.float32) for _ in range(_OUTPUTS)])
    ours, theirs = cycle(batches), cycle(batches)
    tables = files.table("t"), memory.table("t")
    return interleaved(
        {
            "file": rate(lambda: tables[0].lookup(next(ours), out=next(outputs)), _BATCH),
            "memory": rate(lambda: tables[1].lookup(next(theirs), out=next(outputs)), _BATCH),
        },
        _ROUNDS,
    )


def _updates(batches: list[Int64]) -> list[TableUpdate]:
    random = np.random.default_rng(7)
    ids = [np.unique(batch) for batch in batches[:24]]
    return [TableUpdate(some, random.standard_normal((len(some), _DIM), dtype=np.float32)) for some in ids]


def _committing(store: EmbeddingStore, updates: list[TableUpdate]) -> Iterator[None]:
    for version, update in zip(count(1), cycle(updates), strict=False):
        store.commit(Commit(version, {"t": update}, 1, {}))
        yield


def _commits(turns: Mapping[str, Iterator[None]], updates: list[TableUpdate]) -> Rounds:
    """Rows/s of what commits the updates."""
    amount = _TOGETHER * float(np.median([len(update.ids) for update in updates]))
    for turn in turns.values():
        _take(turn, 2 * len(updates))
    return interleaved({name: rate(partial(_take, turn, _TOGETHER), amount) for name, turn in turns.items()}, _ROUNDS)


def _writing(file: BinaryIO, size: int) -> Iterator[None]:
    """Writes so many bytes each time, again and again to the same pages of the system's cache."""
    for number, entry in enumerate(cycle([np.random.default_rng(seed).bytes(size) for seed in range(4)])):
        if number % _ENTRIES == 0:
            file.seek(0)
        file.write(entry)
        yield


def _take(turn: Iterator[None], times: int) -> None:
    for _ in range(times):
        next(turn)


def _zipf(rows: int, batch: int) -> list[Int64]:
    """Batches in which the id of rank k comes with a probability in proportion to k ** -1.05."""
    random = np.random.default_rng(2026)
    shares = np.cumsum(np.arange(1, rows + 1) ** -_SKEW)
    ids = random.permutation(rows)
    return [ids[np.searchsorted(shares, shares[-1] * random.random(batch))] for _ in range(_IDS // batch)]


def _filled(store: EmbeddingStore, rows: int, optimizer: str) -> EmbeddingStore:
    """The store, whose table "t" has all its rows."""
    store.create_table(TableSpec("t", _DIM, rows, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01)))
    store.put("t", _blocks(rows, _SLOTS[optimizer] * _DIM))
    return store


def _blocks(rows: int, slot_width: int) -> Iterator[RowBlock]:
    random = np.random.default_rng(1)
    for start in range(0, rows, 1 << 16):
        ids = np.arange(start, min(start + (1 << 16), rows), dtype=np.int64)
        weights = random.standard_normal((len(ids), _DIM), dtype=np.float32)
        yield RowBlock(ids, weights, np.ones((len(ids), slot_width), np.float32))


def _warm(store: EmbeddingStore, batches: list[Int64]) -> None:
    for batch in batches * 3:
        store.lookup({"t": batch})


if __name__ == "__main__":
    main()
