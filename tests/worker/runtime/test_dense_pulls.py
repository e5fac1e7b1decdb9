"""The dense part of a version comes from the store servers that have it, else from the master, the same either way."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from elastable.embedding_store.composite.partitions.sharded_store import ShardedStore
from elastable.embedding_store.shards.row_pushes import DenseSlice
from elastable.master.api import DenseSnapshot, MasterApi
from elastable.worker.runtime.dense_pulls import DensePulls
from tests.embedding_store.shards.served_shards import served

KERNEL = np.arange(12, dtype=np.float32).reshape(3, 4)
LAYOUT = {0: DenseSlice(KERNEL.dtype, KERNEL.size, "kernel")}
TOLD = DenseSnapshot(7, (), (np.array([2]),), at_servers=True, shapes=((KERNEL.shape, KERNEL.dtype),))


class Answers:
    """A master that says what its client would: variables only where they are asked for."""

    def __init__(self, told: DenseSnapshot | None = TOLD) -> None:
        self.told = told
        self.asked: list[tuple[int | None, bool]] = []

    def pull_dense(
        self, incarnation: str, version: int | None, wait_s: float, whole: bool = False
    ) -> DenseSnapshot | None:
        self.asked.append((version, whole))
        return DenseSnapshot(7, (KERNEL,), (np.array([2]),)) if whole else self.told


def pulled(master: Answers, store: ShardedStore | None, version: int | None = None) -> DenseSnapshot | None:
    return DensePulls(cast(MasterApi, master), store, "w", "j").pull(version, 0.0)


def assert_whole(snapshot: DenseSnapshot | None) -> None:
    assert snapshot is not None
    np.testing.assert_array_equal(snapshot.variables[0], KERNEL)
    np.testing.assert_array_equal(snapshot.states[0], [2])
    assert snapshot.version == 7
    assert snapshot.shapes == ()


def test_from_the_servers() -> None:
    with served(3) as (_, store):
        store.begin_job("j", False, LAYOUT)
        store.keep_dense(7, {0: KERNEL}, LAYOUT)
        master = Answers()
        assert_whole(pulled(master, store))
        assert master.asked == [(None, False)]


@pytest.mark.parametrize("theirs", [6, 8, None])
def test_from_the_master_where_servers_have_another_version(theirs: int | None) -> None:
    with served(3) as (servers, store):
        store.begin_job("j", False, LAYOUT)
        store.keep_dense(7, {0: KERNEL}, LAYOUT)
        if theirs is None:
            servers[1].stop()
            servers[1].start()
        else:
            servers[1].shard.keep_dense(theirs, servers[1].shard.read_dense("j", 7))
        master = Answers()
        assert_whole(pulled(master, store, 7))
        assert master.asked == [(7, False), (7, True)]


def test_from_the_master_that_has_them_or_knows_no_such_version() -> None:
    own = DenseSnapshot(7, (KERNEL,), (np.array([2]),))
    for told in (own, None):
        master = Answers(told)
        assert pulled(master, None) is told
        assert master.asked == [(None, False)]
    master = Answers()
    assert_whole(pulled(master, None))
    assert master.asked == [(None, False), (7, True)]
