"""The ids of every commit, table by table, until a checkpoint takes them."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine import MemoryStore
from elastable.master.checkpoints.dirty_rows import Changes, DirtyRows, IdBitmap
from tests.master.checkpoints.jobs import DYNAMIC, FIXED, commit, created


def updates(**ids: list[int]) -> dict[str, TableUpdate]:
    return {
        table: TableUpdate(np.array(some, np.int64), np.ones((len(some), 1), np.float32)) for table, some in ids.items()
    }


def ids_of(changes: Changes, table: str, most: int = 7) -> list[int] | None:
    blocks = changes.ids(table, most)
    if blocks is None:
        return None
    found: list[Int64] = list(blocks)
    assert all(0 < len(block) <= most for block in found)
    held = [int(one) for block in found for one in block]
    assert len(held) == changes.count(table) == len(set(held))
    return sorted(held)


@given(batches=st.lists(st.lists(st.integers(0, 499), unique=True, max_size=40), max_size=6), most=st.integers(1, 90))
def test_every_id_once(batches: list[list[int]], most: int) -> None:
    with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
        dirty = DirtyRows(store)
        for batch in batches:
            dirty.add(updates(fixed=batch, dynamic=[-one for one in batch]))
        taken = dirty.take(0)
        expected = sorted({one for batch in batches for one in batch})
        assert ids_of(taken, "fixed", most) == expected
        assert ids_of(taken, "dynamic", most) == sorted(-one for one in expected)
        assert ids_of(dirty.take(0), "fixed") == []


def test_the_last_id_of_the_last_word() -> None:
    bits = IdBitmap(129)
    bits.add(np.array([128, 63, 64, 0]))
    bits.add(np.array([128]))
    assert [block.tolist() for block in bits.blocks(3)] == [[0, 63, 64], [128]]
    assert len(bits) == 4


def test_what_is_given_back_is_taken_again() -> None:
    with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
        dirty = DirtyRows(store)
        dirty.add(updates(fixed=[1, 2], dynamic=[-1]))
        first = dirty.take(1)
        dirty.add(updates(fixed=[2, 3]))
        dirty.give_back(first)
        second = dirty.take(2)
        assert (second.version, ids_of(second, "fixed"), ids_of(second, "dynamic")) == (2, [1, 2, 3], [-1])
        dirty.give_back(second)
        store.delete("fixed", np.array([1]))
        commit(store, {"fixed": [9]})
        third = dirty.take(3)
        assert ids_of(third, "fixed") == [1, 2, 3]  # nobody told of the commit
        assert ids_of(dirty.take(3), "fixed") == []


def test_several_that_failed_come_back_together() -> None:
    with created(MemoryStore(threads=1), [DYNAMIC]) as store:
        dirty = DirtyRows(store)
        taken = []
        for one in range(3):
            dirty.add(updates(dynamic=[one]))
            taken.append(dirty.take(one))
        for changes in taken:
            dirty.give_back(changes)
        assert ids_of(dirty.take(3), "dynamic") == [0, 1, 2]


def test_the_table_that_takes_the_most_memory_is_given_up() -> None:
    small = TableSpec("small", 1, 64)
    with created(MemoryStore(threads=1), [DYNAMIC, small]) as store:
        dirty = DirtyRows(store, most_bytes=200_000)
        dirty.add(updates(dynamic=list(range(20_000)), small=[5]))
        assert dirty.bytes < 200_000
        taken = dirty.take(1)
        assert ids_of(taken, "dynamic") is None
        assert ids_of(taken, "small") == [5]
        dirty.add(updates(dynamic=[1]))
        assert ids_of(dirty.take(2), "dynamic") == [1]
        dirty.give_back(taken)
        assert ids_of(dirty.take(2), "dynamic") is None


def test_a_table_that_was_dropped_and_made_again() -> None:
    with created(MemoryStore(threads=1), [DYNAMIC]) as store:
        dirty = DirtyRows(store)
        dirty.add(updates(dynamic=[1]))
        store.drop_table("dynamic")
        dirty.add(updates(dynamic=[1], other=[4]))
        assert dirty.take(1).tables == {}
        created(store, [TableSpec("dynamic", 9)])
        assert ids_of(dirty.take(2), "dynamic") is None


def test_taken_while_others_give_back() -> None:
    with created(MemoryStore(threads=1), [DYNAMIC]) as store:
        dirty = DirtyRows(store)
        seen: set[int] = set()
        for one in range(300):
            dirty.add(updates(dynamic=[one]))
            taken = dirty.take(one)
            if one % 3:
                thread = threading.Thread(target=dirty.give_back, args=(taken,))
                thread.start()
                dirty.add(updates(dynamic=[1000 + one]))
                thread.join(60)
            else:
                seen |= set(ids_of(taken, "dynamic", 64) or [])
        seen |= set(ids_of(dirty.take(300), "dynamic", 64) or [])
        assert seen >= set(range(300))
