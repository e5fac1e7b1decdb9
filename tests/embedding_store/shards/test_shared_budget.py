"""A budget of rows over store servers: the rows that stay are those of one store, whatever fails on the way."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store import EvictionSpec, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.row_data import Commit, EvictionCut, StayingRows
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.shards import server_contract as shards
from elastable.embedding_store.shards.server_contract import offer_of
from elastable.embedding_store.shards.version_sums import sum_pushes
from tests.contracts.store_samples import create_tables
from tests.embedding_store.shards.served_shards import begin_job, served, stopped_with

FEW = TableSpec("few", 2, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(max_rows=11, every=2))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_cut_leaves_those_touched_last_and_of_equal_ones_the_smaller_ids(data: st.DataObject) -> None:
    """However few versions servers list at once."""
    extreme = st.sampled_from([-(2**63), -1, 0, 2**63 - 1])
    ids = data.draw(st.lists(extreme | st.integers(-(2**63), 2**63 - 1), unique=True, max_size=40))
    versions = [data.draw(st.integers(0, 6)) for _ in ids]
    owners = [data.draw(st.integers(0, 2)) for _ in ids]
    budget, most = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    rows = []
    for shard in range(3):
        own = [place for place, owner in enumerate(owners) if owner == shard]
        held = (np.array([each[place] for place in own], np.int64) for each in (versions, ids))
        rows.append(StayingRows(*held))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "FEW_VERSIONS", most)
        patched.setattr(shards, "_MORE", 2)

        def ask(more: int, wanted: tuple[int, int] | None) -> list[shards.RowOffer]:
            return [offer_of(each, more, wanted) for each in rows]

        cut = shards.cut_of(budget, ask(most, None), ask)
    order = sorted(zip(versions, ids, strict=True), key=lambda row: (-row[0], row[1]))
    goes = {
        number
        for version, number in zip(versions, ids, strict=True)
        if version < cut.version or (version == cut.version and cut.least_id is not None and number >= cut.least_id)
    }
    assert goes == {number for _, number in order[budget:]}


def test_servers_that_do_not_say_what_they_have_are_refused() -> None:
    silent = [shards.RowOffer(9)]
    with pytest.raises(StoreFailed, match="6 rows go for max_rows=3"):
        shards.cut_of(3, silent, lambda most, ids: silent)
    tied = [shards.RowOffer(9, ((4, 9),))]
    with pytest.raises(StoreFailed, match="list 0 of 6 rows that were last touched at version 4"):
        shards.cut_of(3, tied, lambda most, ids: tied)


def push(version: int) -> shards.RowPush:
    random = np.random.default_rng(version)
    ids = random.integers(-40, 40, 9)
    few = shards.Slices(ids, random.standard_normal((9, 2)).astype(np.float32))
    return shards.RowPush("job", version, 0, ({"few": few},))


def commit(version: int) -> shards.PushedCommit:
    return shards.PushedCommit(shards.RowSums(version, (shards.SumTerm(0, 0, 1.0),)), version, {"few": 0.1})


def assert_as_alone(store: StoreServers, versions: int) -> None:
    with create_tables(MemoryStore(1), FEW) as alone:
        for version in range(versions):
            updates = sum_pushes(commit(version).sums, {0: push(version).parts})
            alone.commit(Commit(version + 1, updates, version, {"few": 0.1}))
        (theirs,) = alone.scan("few")
        ours = np.sort(np.concatenate([block.ids for block in store.scan("few")]))
        np.testing.assert_array_equal(ours, np.sort(theirs.ids))
        read = store.read_rows("few", theirs.ids)
        assert read.weights.tobytes() == theirs.weights.tobytes()
        assert read.touches is not None
        np.testing.assert_array_equal(read.touches[:, 0], theirs.touches[:, 0])  # type: ignore[index]
        if not versions % FEW.eviction.every:  # type: ignore[union-attr]
            assert len(theirs.ids) == 11


def begin(store: StoreServers, versions: int) -> None:
    store.create_table(FEW)
    begin_job(store, "job")
    for version in range(versions):
        store.push_rows(push(version))
        assert store.commit_pushed(commit(version)).missing == ()


def test_a_commit_that_broke_off_is_repeated_with_what_was_decided(tmp_path: Path) -> None:
    with served(2, tmp_path) as (servers, store):
        begin(store, 7)
        store.push_rows(push(7))
        apply = servers[1].shard.commit
        refused: list[Mapping[str, EvictionCut]] = []

        def refuse_once(pushed: shards.PushedCommit, secret: bytes) -> shards.Committed:
            if not refused:
                refused.append(pushed.cuts)
                raise StoreFailed("the disk is full")
            assert pushed.cuts == refused[0] != {}
            return apply(pushed, secret)

        servers[1].shard.commit = refuse_once  # type: ignore[method-assign, assignment]
        with pytest.raises(StoreFailed, match="the disk is full"):
            store.commit_pushed(commit(7))
        assert [server.store.version() for server in servers] == [8, 7]
        assert store.commit_pushed(commit(7)).missing == ()
        assert refused
        assert_as_alone(store, 8)


def test_servers_that_are_killed_in_turn_change_no_row(tmp_path: Path) -> None:
    with served(3, tmp_path) as (servers, store):
        begin(store, 5)
        for version in range(5, 10):
            store.push_rows(push(version))
            stopped_with(servers, version % 3)
            assert store.commit_pushed(commit(version)).missing == (0,)
            assert [server.store.version() for server in servers] == [version] * 3
            store.push_rows(push(version))
            assert store.commit_pushed(commit(version)).missing == ()
        for number in range(3):
            stopped_with(servers, number)
        assert_as_alone(store, 10)


def test_a_shard_is_not_committed_to_alone() -> None:
    with served(2) as (servers, store):
        begin(store, 1)
        store.push_rows(push(1))
        with pytest.raises(BadInput, match="has to say so of few: such tables are committed to through all"):
            store._servers[0].commit_pushed(commit(1))
        with pytest.raises(BadInput, match="max_rows of all shards of tables few, and has to say so of none"):
            servers[0].store.commit(replace(Commit(2, {}, 1, {}, frozen=("few",)), cuts={"few": EvictionCut(0)}))
        assert [server.store.version() for server in servers] == [1, 1]
        assert store.commit_pushed(commit(1)).missing == ()
        assert_as_alone(store, 2)
