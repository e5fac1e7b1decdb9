"""A process that trains over Redis, which keeps its index, is killed again and again: no bit differs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from elastable.embedding_store import Commit, EvictionSpec, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.dense_replay import table_replay
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.optimizers.dense_replay import chapter
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from tests.contracts.store_samples import rows_by_id

ADAM = OptimizerSpec.of("adam", learning_rate=0.01)
SPECS = (
    TableSpec("old", 8, optimizer=ADAM, eviction=EvictionSpec(max_age=30, every=3)),
    TableSpec("few", 8, optimizer=ADAM, eviction=EvictionSpec(max_rows=900)),
    TableSpec("rare", 8, optimizer=ADAM, eviction=EvictionSpec(min_frequency=2, every=20)),
    TableSpec("timed", 8, optimizer=ADAM, eviction=EvictionSpec(ttl=25.0, max_rows=1200, every=2)),
    TableSpec("follows", 8, optimizer=OptimizerSpec.of("adamw", lazy=False, weight_decay=0.01)),
)


def step(store: EmbeddingStore) -> None:
    """The next version of a seeded job."""
    version = store.version()
    random = np.random.default_rng(version)
    updates = {}
    for spec in SPECS:
        ids = np.unique(random.integers(0, 4_000, 120))
        updates[spec.name] = TableUpdate(ids, random.normal(size=(len(ids), 8)).astype(np.float32))
    store.commit(Commit(version + 1, updates, version, {}, ends_chapter=version % 25 == 0, time=1000.0 + version))


def train(url: str, until: int) -> None:
    """What the process does: it says which versions are committed."""
    remember_little()
    with open_store(url, threads=1) as store:
        for spec in SPECS:
            store.create_table(spec)
        while store.version() < until:
            step(store)
            print(store.version(), flush=True)


def remember_little(patched: pytest.MonkeyPatch | None = None) -> None:
    """Rows are brought to newer chapters all the time, as after very many steps."""
    patched = pytest.MonkeyPatch() if patched is None else patched
    patched.setattr(chapter, "_FEWEST", 8)
    patched.setattr(table_replay, "TableSteps", lambda name, form: TableSteps(name, form, most=64))


@pytest.mark.process
def test_a_process_that_is_killed_again_and_again_changes_no_bit(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, until = f"{redis_url}?index=redis&budget=1MiB&flush=0.02&partitions=4", 240
    code = f"from {__name__} import train\ntrain({url!r}, {until})"
    for kill in (*range(30, until, 50), until):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            version = 0
            while version < kill:
                line = process.stdout.readline()
                assert line, "the process has failed"
                version = int(line)
            if kill < until:
                process.kill()
        assert (process.returncode == 0) == (kill == until)
    remember_little(monkeypatch)
    with MemoryStore(1) as plain:
        for spec in SPECS:
            plain.create_table(spec)
        while plain.version() < until:
            step(plain)
        for index in ("redis", "memory"):
            with open_store(f"{redis_url}?index={index}", threads=1) as store:
                assert store.version() == until
                for spec in SPECS:
                    assert rows_by_id(store, spec.name) == rows_by_id(plain, spec.name), spec.name
                    assert store.table_state(spec.name) == plain.table_state(spec.name)
        assert 100 < plain.row_count("rare") < 4_000 > plain.row_count("old") > 900 == plain.row_count("few")
