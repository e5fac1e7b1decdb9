"""A committer makes the same numbers, to the bit, of pushes at store servers and of pushes held in one process."""

import json
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import pytest

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.optimizers.registry import known_row_optimizers
from elastable.embedding_store.shards.ownership import session_of
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master import api
from elastable.master.commits.committer import Committer
from elastable.master.commits.dense_part import Clipping, DensePart, OptimizerStep
from elastable.master.model.wrapping_optimizers import register_job_optimizers
from elastable.master.push_check import TensorSpec
from elastable.master.tasks.progress import Progress
from elastable.worker.runtime.loop import push_rows
from tests.embedding_store.shards.served_shards import KEY, served
from tests.master.checkpoints.jobs import rows
from tests.untyped import Keywords

register_job_optimizers()
VERSIONS, IDS = 8, 60
ADAM = OptimizerSpec.of("adam")
FUSED = [name for name in known_row_optimizers() if name not in ("averaged", "constrained", "keras")]
BLOCK = OptimizerSpec("keras", (), json.dumps(keras.optimizers.serialize(keras.optimizers.Adagrad(0.01))))
SPECS = [
    *(TableSpec(f"of-{name}", 3, IDS, optimizer=OptimizerSpec.of(name)) for name in FUSED),
    TableSpec("keras", 3, IDS, optimizer=BLOCK),
    TableSpec("follows", 2, IDS, optimizer=OptimizerSpec.of("adam", lazy=False)),
    TableSpec("half", 4, None, "float16", optimizer=OptimizerSpec.of("sgd", momentum=0.9)),
    TableSpec("strings", 2, optimizer=ADAM, ids="farmhash64"),
    TableSpec("admits", 2, optimizer=ADAM, admission=AdmissionSpec(2, 1 << 16)),
    TableSpec("aged", 2, optimizer=ADAM, eviction=EvictionSpec(max_age=1)),
    TableSpec("rare", 2, optimizer=ADAM, eviction=EvictionSpec(min_frequency=2, every=3)),
    TableSpec("timed", 2, optimizer=ADAM, eviction=EvictionSpec(ttl=20.0)),
    TableSpec("few", 2, optimizer=ADAM, eviction=EvictionSpec(max_rows=7)),
    TableSpec("tied", 2, optimizer=ADAM, eviction=EvictionSpec(max_rows=9, every=4), ids="farmhash64"),
    TableSpec(
        "picky",
        2,
        optimizer=ADAM,
        admission=AdmissionSpec(2, 1 << 16),
        eviction=EvictionSpec(max_age=3, min_frequency=1, max_rows=4, every=2, ttl=60.0),
    ),
]


VARIABLES = (
    TensorSpec("kernel", (2, 3), np.dtype(np.float32)),
    TensorSpec("half", (2,), np.dtype(np.float16)),
    TensorSpec("scale", (), np.dtype(np.float64)),
)


class Dense(DensePart):
    """The dense part of a model whose optimizer clips, and may leave tables alone. It notes what it is given."""

    variables = VARIABLES

    def __init__(self, clipping: Clipping, may_overflow: bool = False) -> None:
        self.clipping, self.may_overflow = clipping, may_overflow
        self.frozen_tables: tuple[str, ...] = ()
        self.applied: list[list[bytes]] = []
        self.version = 0

    def apply(self, gradients: Sequence[api.Tensor], states: Sequence[api.Tensor], rate_share: float = 1.0) -> None:
        assert [(each.shape, each.dtype) for each in gradients] == [(spec.shape, spec.dtype) for spec in VARIABLES]
        self.applied.append([each.tobytes() for each in gradients])
        self.version += 1

    def overflow(self, states: Sequence[api.Tensor]) -> None:
        self.version += 1

    def snapshot(self, version: int, tensors: Mapping[str, api.Tensor] | None = None) -> api.DenseSnapshot:
        values = tuple(np.full(spec.shape, version + place, spec.dtype) for place, spec in enumerate(VARIABLES))
        return api.DenseSnapshot(version, values, ())

    def steps(self) -> tuple[OptimizerStep, ...]:
        return (OptimizerStep(self.version, 0.05 / (1 + self.version), self.clipping),)


def push_of(version: int, micro_batch: int, mode: str, overflows: bool = False) -> api.Push:
    """Ids of all tables, some of which come twice; two parts, one of which is divided by rows."""
    random = np.random.default_rng([version, micro_batch])

    def slices() -> dict[str, Slices]:
        found = {}
        for spec in SPECS if version % 3 else SPECS[::2]:
            ids = random.integers(0, IDS, 12)
            values = (random.standard_normal((12, spec.dim)) * 10.0 ** random.integers(-3, 3)).astype(np.float32)
            found[spec.name] = Slices(ids if spec.vocabulary_size else ids * 1_000_003 - 2**40, values)
        if overflows:
            found["keras"].values[3, 1] = np.inf
        return found

    once = {
        name: Slices(np.unique(each.indices), np.full((len(np.unique(each.indices)), each.values.shape[1]), 0.25, "f4"))
        for name, each in slices().items()
    }
    name = api.SyncPushId(version, micro_batch) if mode == "sync" else api.AsyncPushId("w", version + 1, version)
    dense = tuple(random.standard_normal(spec.shape).astype(spec.dtype) for spec in VARIABLES)
    if overflows and micro_batch:
        dense[0][1, 2] = np.nan
    of_rows = {0: random.standard_normal((2, 3)).astype("f4")} if micro_batch else {}
    parts = (api.GradientPart(api.Divisor(api.DivisorKind.ROWS), of_rows, once, {}),)
    records = api.Divisor(api.DivisorKind.RECORDS)
    rest: Keywords = {"job": "j", "computed_on": version, "divisor": records, "parts": parts}
    return api.Push(name, 3 + micro_batch, dense, slices(), **rest)


def trained(
    store: EmbeddingStore, clipping: Clipping, mode: str, may_overflow: bool
) -> tuple[Snapshot, list[set[str]], list[list[bytes]]]:
    """Eight versions: one of them overflows, one leaves two tables alone. A pin of version 4, and what changed."""
    for spec in SPECS:
        store.create_table(spec)
    dense = Dense(clipping, may_overflow)
    times = iter(range(1_000, 1_000 + 11 * VERSIONS, 11))
    job = api.JobSpec(job="j", mode=mode)
    committer = Committer(store, dense, job, 60.0, clock=lambda: float(next(times)), ahead=mode == "sync")
    servers = store if isinstance(store, StoreServers) else None
    if servers is not None:
        servers.begin_job("j", may_overflow, KEY)
        servers.show_session(session_of(KEY, "w"))
    changed: list[set[str]] = []
    for version in range(VERSIONS):
        dense.frozen_tables = ("follows", "aged", "tied") if version == 3 else ()
        pushes = [
            push_of(version, number, mode, may_overflow and version == 2)
            for number in range(2 if mode == "sync" else 1)
        ]
        if servers is not None:
            # In which order they come does not matter.
            pushes = [push_rows(push, servers, job, 60.0, lambda: None) for push in reversed(pushes)][::-1]
        made = committer.commit(version + 1, pushes, lambda made: Progress(version + 1))  # noqa: B023 - called at once
        assert committer.unlogged is None
        changed.append(set(made.changed))
        if version == 3:
            pinned = store.pin(None, 600.0)
    return pinned, changed, dense.applied


def assert_same(theirs: EmbeddingStore | Snapshot, ours: EmbeddingStore | Snapshot) -> None:
    assert theirs.version() == ours.version()
    assert rows(theirs) == rows(ours)
    for spec in SPECS:
        asked = np.arange(-5, IDS) if spec.vocabulary_size is None else np.arange(IDS)
        one, other = (source.lookup({spec.name: asked})[spec.name] for source in (theirs, ours))
        assert one.tobytes() == other.tobytes(), spec.name


@pytest.mark.parametrize(
    ("servers", "clipping", "mode", "may_overflow"),
    [
        (1, Clipping(), "async", False),
        (2, Clipping(clipnorm=0.5), "sync", False),
        (3, Clipping(global_clipnorm=0.5), "async", True),
        (5, Clipping(global_clipnorm=0.5), "sync", True),
        pytest.param(3, Clipping(clipvalue=0.01), "sync", False, marks=pytest.mark.slow),
        pytest.param(2, Clipping(clipnorm=0.5), "async", True, marks=pytest.mark.slow),
    ],
)
def test_servers_make_the_same_numbers(servers: int, clipping: Clipping, mode: str, may_overflow: bool) -> None:
    with MemoryStore(1) as alone, served(servers) as (_, store):
        theirs, of_one, dense_of_one = trained(alone, clipping, mode, may_overflow)
        ours, of_servers, dense_of_servers = trained(store, clipping, mode, may_overflow)
        assert of_one == of_servers
        assert dense_of_one == dense_of_servers
        assert len(dense_of_one) == VERSIONS - may_overflow
        assert [table for table in SPECS if not alone.table_statistics(table.name).rows] == []
        for table in ("aged", "rare", "timed", "few", "tied", "picky"):
            assert alone.table_statistics(table).evicted > 0, table
        for table in ("admits", "picky"):
            assert alone.table_statistics(table).refused > 0, table
        assert_same(alone, store)
        assert_same(theirs, ours)
        for spec in SPECS:
            for count in ("rows", "evicted", "refused"):
                one, other = (getattr(source.table_statistics(spec.name), count) for source in (alone, store))
                assert one == other, (spec.name, count)
        theirs.close()
        ours.close()
