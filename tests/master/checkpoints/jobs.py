"""Small jobs on stores, and what of them a checkpoint must bring back."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.master.api import JobSpec, Tensor
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.tasks.progress import Progress

ADAGRAD = OptimizerSpec.of("adagrad")
FIXED = TableSpec("fixed", 3, 500, optimizer=OptimizerSpec.of("adam"))
DYNAMIC = TableSpec("dynamic", 2, optimizer=ADAGRAD)
AGED = TableSpec("aged", 2, optimizer=ADAGRAD, eviction=EvictionSpec(max_age=5, min_frequency=1, every=3))
SEEN = TableSpec("seen", 2, optimizer=ADAGRAD, admission=AdmissionSpec(2, 1 << 12))
SPECS = (FIXED, DYNAMIC, AGED, SEEN)
JOB = JobSpec(job="small", store_url="redis://user:secret@host:1")

Rows = dict[tuple[str, int], tuple[bytes, bytes, bytes]]


def created(store: EmbeddingStore, specs: Sequence[TableSpec] = SPECS) -> EmbeddingStore:
    for spec in specs:
        store.create_table(spec)
    return store


def shards(count: int, strategy: str) -> PartitionedStore:
    """A store in memory that is split over so many."""
    return PartitionedStore([MemoryStore(threads=1) for _ in range(count)], strategy)


def flip(file: Path, place: int | None = None) -> None:
    """Flips a bit of a file, of its byte `place` or of one in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 3 if place is None else place] ^= 1
    file.write_bytes(content)


def commit(
    store: EmbeddingStore, ids: Mapping[str, Sequence[int]], frozen: tuple[str, ...] = ()
) -> Mapping[str, TableUpdate]:
    """The next version: a gradient for some ids of some tables, a function of the version alone."""
    version, specs = store.version() + 1, store.specs()
    updates = {}
    for table, some in ids.items():
        unique = np.unique(np.array(some, np.int64))
        gradients = np.random.default_rng(version).normal(size=(len(unique), specs[table].dim)).astype(np.float32)
        updates[table] = TableUpdate(unique, gradients)
    store.commit(Commit(version, updates, version - 1, {}, frozen=frozen))
    return updates


def train(store: EmbeddingStore, versions: int, most: int = 60) -> list[Mapping[str, TableUpdate]]:
    """Some versions on all tables; what was committed."""
    made = []
    for _ in range(versions):
        random = np.random.default_rng(store.version())
        made.append(commit(store, {name: random.integers(0, most, 8).tolist() for name in store.specs()}))
    return made


def rows(source: Snapshot) -> Rows:
    """Every row, its slots and touches, to the bit."""
    version = source.version()
    return {
        (name, int(one)): (block.weights[i].tobytes(), block.slots[i].tobytes(), _bytes(block.touches, i, version))
        for name in source.specs()
        for block in source.scan(name)
        for i, one in enumerate(block.ids)
    }


def _bytes(touches: Tensor | None, i: int, version: int) -> bytes:
    if touches is None:
        return b""
    # Put without a version, it gets that of the next commit.
    return np.where(touches[i] == 2**62, version + 1, touches[i]).tobytes()


def dense_of(version: int) -> dict[str, Tensor]:
    return {
        "variables/00000": np.random.default_rng(version).normal(size=(3, 4)).astype(np.float32),
        "optimizer/00000": np.array(version, np.int64),
    }


def progress_of(version: int) -> Progress:
    return Progress(version, records=100 * version, sequences={"worker": version})


def written(place: str | Path | CheckpointFiles, source: Snapshot, version: int | None = None, **options: Any) -> str:
    """Writes a checkpoint of the rows, of their version where none is said; its address."""
    version = source.version() if version is None else version
    return write_checkpoint(place, source, dense_of(version), JOB, progress_of(version), **options)


def saved(place: str | Path, source: Snapshot) -> Checkpoint:
    return open_checkpoint(written(place, source))


def begun(series: CheckpointSeries, source: Snapshot, version: int | None = None) -> Callable[[], str]:
    """What writes the next checkpoint of a series, of the rows' version where none is said."""
    version = source.version() if version is None else version
    return series.begin(source, dense_of(version), JOB, progress_of(version))


def restored(checkpoint: Checkpoint) -> Rows:
    with MemoryStore(1) as store:
        restore_tables(checkpoint, store)
        assert store.version() == checkpoint.version
        return rows(store)
