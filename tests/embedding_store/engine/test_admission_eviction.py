"""Which ids are admitted and which rows are evicted: sketches, touches and times, and what a table makes of them."""

import threading
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, TableStatistics, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.membership import AdmissionSketch, RowMembership, TouchTimes
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.id_index import IdIndex
from tests.contracts.store_pins import whole
from tests.contracts.store_samples import commit as commit_updates
from tests.contracts.store_samples import create_tables, int64, rows_by_id, update
from tests.threads import on_threads


def table(name: str = "t", admission: AdmissionSpec | None = None, eviction: EvictionSpec | None = None) -> TableSpec:
    return TableSpec(name, 3, optimizer=OptimizerSpec.of("adagrad"), admission=admission, eviction=eviction)


def commit(store: EmbeddingStore, **ids: list[int]) -> None:
    commit_updates(store, {name: update(int64(*some), 3) for name, some in ids.items()})


def test_statistics() -> None:
    with create_tables(MemoryStore(), table("a", admission=AdmissionSpec(2, 1 << 12))) as store:
        store.create_table(table("e", eviction=EvictionSpec(max_rows=2)))
        commit(store, a=[1, 2, 3], e=[1, 2, 3])
        commit(store, a=[1, 2], e=[9])
        admitting, evicting = store.table_statistics("a"), store.table_statistics("e")
        assert (admitting.rows, admitting.refused, admitting.evicted) == (2, 3, 0)
        assert (evicting.rows, evicting.refused, evicting.evicted) == (2, 0, 2)
        assert admitting.bytes is not None
        assert admitting.bytes >= 1 << 12
        store.clear("a")
        assert store.table_statistics("a") == TableStatistics(0, admitting.bytes - 2 * (8 + 24), written=3)
        store.put("e", [block := store.read_rows("e", np.array([9]))])
        assert store.delete("e", np.array([9, 77])) == len(block.ids) == 1
        statistics = store.table_statistics("e")
        assert (statistics.deleted, statistics.written) == (1, 1)


def test_no_room_for_a_row_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(kept: RowMembership, count: int) -> None:
        raise MemoryError("no room")

    many = list(range(2, 10_000))  # more than there is room for
    with create_tables(MemoryStore(), table("t", AdmissionSpec(1), EvictionSpec(max_rows=1))) as store:
        commit(store, t=[1])
        before = whole(store, ["t"])
        with monkeypatch.context() as broken:
            broken.setattr(RowMembership, "grow", no_room)
            with pytest.raises(MemoryError):
                commit(store, t=many)
        assert (whole(store, ["t"]), store.version()) == (before, 1)
        commit(store, t=many)
        assert set(rows_by_id(store, "t")) == {2}


def test_rows_are_evicted_while_others_look_them_up() -> None:
    ids: Int64 = np.arange(20_000)
    spec = TableSpec("t", 8, None, "float32", InitializerSpec("zeros"), eviction=EvictionSpec(1))
    done = threading.Event()
    with create_tables(MemoryStore(), spec) as store:

        def read() -> None:
            while not done.is_set():
                found = store.lookup({"t": ids})["t"]
                assert (found == found[:, :1]).all(), "torn row"
                # Each version touches one third, and lets go of the third that was touched two versions before.
                assert len(np.unique(found[:, 0])) <= 3, f"two versions at once: {np.unique(found[:, 0])}"

        def train() -> None:
            for version in range(30):
                some = ids[version % 3 :: 3]
                update = TableUpdate(some, np.full((len(some), 8), -1, np.float32))
                store.commit(Commit(version + 1, {"t": update}, version, {"t": 1.0}))
            done.set()

        on_threads([train, *[read] * 8], done)
        assert store.row_count("t") == len(ids[29 % 3 :: 3]) + len(ids[28 % 3 :: 3])


def sketch(counters: int, sightings: int = 3, seed: int = 0, name: str = "t") -> AdmissionSketch:
    return AdmissionSketch(TableSpec(name, 1, seed=seed), AdmissionSpec(sightings, counters))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20, unique=True), max_size=20))
def test_nobody_is_admitted_late(commits: list[list[int]]) -> None:
    counted, seen = sketch(16), dict[int, int]()
    for ids in commits:
        batch = np.array(ids, np.int64)
        admitted = counted.admits(batch)
        for one, comes in zip(ids, admitted.tolist(), strict=True):
            assert comes or seen.get(one, 0) + 1 < 3
            seen[one] = seen.get(one, 0) + 1
        counted.count(batch)


def test_hardly_anybody_is_admitted_early_where_there_is_room() -> None:
    counted = sketch(1 << 16)
    once, twice = np.arange(5000) * 7919, -np.arange(1, 1001)
    counted.count(once)
    counted.count(twice)
    counted.count(twice)
    assert counted.admits(twice).all()
    assert np.count_nonzero(counted.admits(once)) <= 5
    assert not counted.admits(np.arange(10**9, 10**9 + 1000)).any()


def test_counters_stop_at_255() -> None:
    counted, one = sketch(16, sightings=255), np.array([5], np.int64)
    for number in range(1, 300):
        assert bool(counted.admits(one)[0]) == (number >= 255)
        counted.count(one)
    assert counted.read().max() == 255


def test_the_sketch_is_of_its_table_and_seed() -> None:
    ids = np.arange(300)
    first, again, other, seeded = sketch(1 << 10), sketch(1 << 10), sketch(1 << 10, name="u"), sketch(1 << 10, seed=1)
    for each in (first, again, other, seeded):
        each.count(ids)
    assert (first.read() == again.read()).all()
    assert (first.read() != other.read()).any()
    assert (first.read() != seeded.read()).any()


EXTREME = st.sampled_from([-(2**63), -(2**63) + 1, -1, 0, 2**63 - 1])


def evicted(eviction: EvictionSpec, version: int, touches: list[tuple[int, int]], ids: list[int]) -> set[int]:
    directory, kept = IdIndex(), RowMembership(TableSpec("t", 1, eviction=eviction), len(ids))
    directory.reserve(len(ids))
    directory.claim(np.array(ids, np.int64), np.empty(len(ids), np.int64))
    kept.put(np.arange(len(ids)), np.array(touches, np.int64).reshape(-1, 2))
    gone = list[int]()

    def remove(some: Int64) -> int:
        gone.extend(some.tolist())
        return len(some)

    kept.evict(version, directory, remove)
    assert kept.evicted == len(gone) == len(set(gone))
    return set(gone)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_budget_keeps_those_touched_last_and_of_equal_ones_the_smaller_ids(data: st.DataObject) -> None:
    ids = data.draw(st.lists(EXTREME | st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30))
    newest = data.draw(st.sampled_from([3, 2**12, 2**61]))
    versions = [data.draw(st.integers(0, newest)) for _ in ids]
    budget = data.draw(st.integers(1, 12))
    order = sorted(zip(versions, ids, strict=True), key=lambda row: (-row[0], row[1]))
    touches = [(version, 0) for version in versions]
    assert evicted(EvictionSpec(max_rows=budget), newest, touches, ids) == {one for _, one in order[budget:]}


@pytest.mark.parametrize("rows", [4095, 4096, 4097, 12_289])
def test_more_rows_than_go_at_a_time(rows: int) -> None:
    ids = list(range(rows))
    assert evicted(EvictionSpec(max_age=1), 9, [(1, 0)] * rows, ids) == set(ids)
    assert evicted(EvictionSpec(max_rows=7), 9, [(1, 0)] * rows, ids) == set(ids[7:])


PAUSES = st.lists(st.integers(0, 5) | st.integers(0, 3000), min_size=1, max_size=60)


def noted(times: TouchTimes, milliseconds: list[int], first: int = 1) -> None:
    for version, now in enumerate(milliseconds, first):
        times.note(version, now / 1000 + 1e-7)


@given(pauses=PAUSES, ttl_ms=st.integers(1, 1024))
def test_a_short_ttl_is_kept_to_the_millisecond(pauses: list[int], ttl_ms: int) -> None:
    times, clock = TouchTimes("t", ttl_ms / 1000), list(accumulate(pauses))
    noted(times, clock)
    gone = [version for version, now in enumerate(clock, 1) if clock[-1] - now > ttl_ms]
    assert times.oldest == max(gone, default=-1) + 1


@given(pauses=PAUSES, ttl=st.integers(2, 4_000_000))
def test_no_row_goes_too_early_or_much_too_late(pauses: list[int], ttl: int) -> None:
    times, clock = TouchTimes("t", ttl), [1000 * now for now in accumulate(pauses)]
    noted(times, clock)
    ages = [clock[-1] - now for now in clock]
    assert all(age > 1000 * ttl for age in ages[: max(0, times.oldest - 1)])
    assert all(age <= 1000 * ttl * (1 + 1 / 1000) + 1 for age in ages[max(0, times.oldest - 1) :])


def test_it_takes_some_kilobytes_whatever_the_pace() -> None:
    times = TouchTimes("t", 100.0)
    noted(times, list(range(0, 1_000_000, 7)))
    kept = times.read()
    assert kept.nbytes < 25_000
    times.require(kept)


@given(pauses=PAUSES, more=PAUSES, ttl_ms=st.integers(1, 5000))
def test_what_is_kept_goes_on_alike(pauses: list[int], more: list[int], ttl_ms: int) -> None:
    times, again = TouchTimes("t", ttl_ms / 1000), TouchTimes("t", ttl_ms / 1000)
    clock = list(accumulate(pauses))
    noted(times, clock)
    again.require(times.read())
    again.write(times.read())
    for number, now in enumerate(accumulate(more), len(clock) + 1):
        noted(times, [clock[-1] + now], number)
        noted(again, [clock[-1] + now], number)
        assert again.oldest == times.oldest
        np.testing.assert_array_equal(again.read(), times.read())


@given(pauses=PAUSES, back=st.integers(0, 60), ttl_ms=st.integers(1, 5000))
def test_after_a_reset_rows_are_as_old_as_they_were(pauses: list[int], back: int, ttl_ms: int) -> None:
    times, clock = TouchTimes("t", ttl_ms / 1000), list(accumulate(pauses))
    noted(times, clock)
    version = max(1, len(clock) - back)
    later = clock[-1] + 500
    noted(times, [later], version)
    times.require(times.read())
    ages = [later - now for now in clock[: version - 1]]
    assert all(age > ttl_ms for age in ages[: max(0, times.oldest - 1)])
    assert times.read()[-1, 0] == version


@pytest.mark.parametrize(
    "times",
    [
        np.zeros((2, 2), np.int64),
        np.zeros((1, 3), np.float64),
        np.array([[5, 1, 2], [4, 3, 4]]),
        np.array([[4, 1, 2], [5, 1, 4]]),
        np.array([[4, -1, 2]]),
        np.stack([np.arange(5000)] * 3, axis=1),
    ],
)
def test_touch_times_that_cannot_be_are_refused(times: np.ndarray) -> None:
    with pytest.raises(BadInput, match=r"table 't': touch times must be"):
        TouchTimes("t", 1.0).require(times)
