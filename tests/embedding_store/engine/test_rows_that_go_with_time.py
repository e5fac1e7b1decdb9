"""Rows that go with time: a store that comes back is at the bits of the one that died, whatever the clock says now."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest

from elastable.embedding_store import Commit, EmbeddingStore, EvictionSpec, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.engine import staged_commit
from elastable.embedding_store.open_store import open_store
from tests.contracts.store_pins import whole

SPEC = TableSpec("t", 2, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(ttl=5.0, every=2))
VERSIONS = 24


def train(store: EmbeddingStore, versions: int) -> None:
    for version in range(store.version(), store.version() + versions):
        random = np.random.default_rng(version)
        ids = np.unique(random.integers(0, 40, 4))
        update = TableUpdate(ids, random.normal(size=(len(ids), 2)).astype(np.float32))
        store.commit(Commit(version + 1, {"t": update}, version, {}, time=1000.0 + 0.7 * version))


def everything(store: EmbeddingStore) -> tuple[int, dict[str, object]]:
    return store.version(), whole(store, ["t"])


@pytest.mark.process
@pytest.mark.parametrize("flushed_at", [0, 9, VERSIONS // 2])
@pytest.mark.parametrize("kind", ["memory", "files", "redis"])
def test_a_store_that_died_comes_back_without_reading_the_clock(
    kind: str, flushed_at: int, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log and its tier are copied as they are at that moment; those in Redis are read while it is open."""
    if kind == "redis":
        url = again = f"{request.getfixturevalue('redis_url')}?flush=100000"
    elif kind == "files":
        url, again = (f"file://{tmp_path / name}?flush=100000" for name in ("store", "again"))
    else:
        url, again = (f"memory?log={tmp_path / name}" for name in ("store", "again"))
    with open_store(url) as store, open_store("memory") as undisturbed:
        for each in (store, undisturbed):
            each.create_table(SPEC)
            train(each, VERSIONS // 2)
        if flushed_at and hasattr(store, "flush"):
            store.flush()
        train(store, flushed_at)
        train(undisturbed, flushed_at)
        expected = everything(undisturbed)
        assert everything(store) == expected
        if kind != "redis":
            shutil.copytree(tmp_path / "store", tmp_path / "again")

        def unasked() -> NoReturn:
            raise AssertionError("the clock was read")

        with monkeypatch.context() as patched:
            patched.setattr(staged_commit, "time", SimpleNamespace(time=unasked))
            with open_store(again) as back:
                assert everything(back) == expected
                if kind != "redis":  # the store that is open still owns it
                    train(back, 6)
                    train(undisturbed, 6)
                    assert everything(back) == everything(undisturbed)
