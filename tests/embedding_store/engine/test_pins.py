"""Pins of stores in this process: bounded, freed after the dead, all or none, past caches."""

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store import EmbeddingStore, MemoryStore
from elastable.embedding_store.composite.partitioned_store import PartitionedStore, PlacedStore
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.snapshot import PinStatistics, Snapshot, joined_pins
from elastable.embedding_store.contract.spec import EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.engine.before_images import BeforeImages
from elastable.embedding_store.engine.pins import PinKeeper, StorePins
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreFailed, Unavailable
from tests.contracts.store_history import History, Program, Random, programs
from tests.contracts.store_pins import whole
from tests.contracts.store_samples import commit, create_tables, fixed, int64, rows_by_id, update
from tests.embedding_store.engine.tiered_stores import crowded_store
from tests.embedding_store.tiers.dict_tier import DictTier
from tests.file_stores import file_store, quick_folder
from tests.plugins.seeds import examples
from tests.waiting import until

SPEC = TableSpec("t", 8, None, optimizer=OptimizerSpec.of("adam"))
MIB = 1 << 20


def test_what_is_kept_stays_within_its_bound_and_the_oldest_pin_goes() -> None:
    with MemoryStore(2, before_image_bytes=MIB) as store, MemoryStore(2) as free:
        for each in (store, free):
            each.create_table(SPEC)
            commit(each, {"t": update(np.arange(3_000), 8)})
        pins, reported = [], []
        for seed in range(12):
            if seed % 2 == 0:
                pins.append(store.pin())
                reported.append(rows_by_id(store, "t"))
            change = update(np.random.default_rng(seed).permutation(6_000)[:1_500], 8, seed)
            for each in (store, free):
                commit(each, {"t": change})
            assert sum({pin.version: pin.bytes for pin in store.pins()}.values()) <= MIB  # of before-images
        assert rows_by_id(store, "t") == rows_by_id(free, "t")
        standing = [one.version for one in store.pins()]
        assert standing == [pin.version() for pin in pins[-len(standing) :]]
        assert 1 <= len(standing) < 6
        for pin, rows in zip(pins, reported, strict=True):
            if pin.version() in standing:
                assert rows_by_id(pin, "t") == rows  # type: ignore[arg-type]
                continue
            with pytest.raises(StaleVersion, match=rf"version {pin.version()}.*given up.*{MIB}"):
                pin.lookup({"t": int64(1)})
            with pytest.raises(StaleVersion, match=rf"version {pin.version()}.*given up.*pinned are"):
                store.lookup({"t": int64(1)}, pin.version())


def test_what_an_eviction_counts_anew_is_handed_to_the_older_pin() -> None:
    with create_tables(MemoryStore(2), TableSpec("t", 2, eviction=EvictionSpec(min_frequency=1, every=4))) as store:
        commit(store, {"t": update(np.arange(10), 2)})
        first, before = store.pin(), whole(store, ["t"])
        commit(store, {"t": update(int64(0), 2)})
        second, later = store.pin(), whole(store, ["t"])
        for one in (1, 2):
            commit(store, {"t": update(int64(one), 2)})
        assert (store.version(), store.row_count("t")) == (4, 10)
        assert whole(store, ["t"]) != later  # version 4 has counted anew
        assert (whole(first, ["t"]), whole(second, ["t"])) == (before, later)
        second.close()
        assert whole(first, ["t"]) == before


def test_the_decay_of_other_rows_is_not_restored_while_a_pin_reads_them() -> None:
    with MemoryStore(2) as store:
        adamw = OptimizerSpec.of("adamw", lazy=False, weight_decay=0.1)
        store.create_table(TableSpec("t", 2, optimizer=adamw))
        commit(store, {"t": update(int64(1), 2)})
        rows = store.lookup({"t": int64(7)})["t"]
        with store.pin() as pin:
            with pytest.raises(BadInput, match="decay of other rows of table 't' cannot be restored while"):
                store.put_table_state("t", TableState(untouched_decay=-0.5))
            np.testing.assert_array_equal(pin.lookup({"t": int64(7)})["t"], rows)
        store.put_table_state("t", TableState(untouched_decay=-0.5))
        assert (store.lookup({"t": int64(7)})["t"] != rows).all()


@pytest.mark.parametrize("when", ["add", "take_over"])
def test_a_system_without_memory_ends_pins_and_no_commit(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    with MemoryStore(2) as store, MemoryStore(2) as free:
        for each in (store, free):
            each.create_table(SPEC)
            each.create_table(fixed())
            commit(each, {"t": update(np.arange(300), 8)})
        first = store.pin()
        commit(store, {"t": update(np.arange(50), 8)})
        commit(free, {"t": update(np.arange(50), 8)})
        second = store.pin()

        def refuse(*arguments: object) -> None:
            raise MemoryError("on purpose")

        monkeypatch.setattr(BeforeImages, when, refuse)
        if when == "take_over":
            second.close()
        for each in (store, free):
            commit(each, {"t": update(np.arange(100, 200), 8), "cities": update(int64(4), 4)})
            each.delete("t", np.arange(5))
        assert rows_by_id(store, "t") == rows_by_id(free, "t")
        with pytest.raises(StaleVersion, match="no memory"):
            first.lookup({"t": int64(1)})
        assert store.pins() == ()
        monkeypatch.undo()
        with store.pin() as pin:
            rows = rows_by_id(store, "t")
            commit(store, {"t": update(np.arange(300), 8)})
            assert rows_by_id(pin, "t") == rows  # type: ignore[arg-type]


class Refusing(MemoryStore):
    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        raise Unavailable("gone for a moment")


JOINED: dict[str, Callable[[EmbeddingStore, EmbeddingStore], EmbeddingStore]] = {
    "partitioned": lambda one, other: PartitionedStore([one, other]),
    "placed": lambda one, other: PlacedStore({"a": one, "b": other}, {"t": "b"}, default="a"),
}


@pytest.mark.parametrize("kind", JOINED)
def test_several_stores_are_pinned_all_or_none(kind: str) -> None:
    first = MemoryStore(1)
    with create_tables(JOINED[kind](first, Refusing(1)), SPEC) as store:
        with pytest.raises(Unavailable, match="gone for a moment"):
            store.pin()
        assert first.pins() == store.pins() == ()


@pytest.mark.parametrize("kind", JOINED)
def test_a_pin_that_one_of_several_stores_gave_up_is_gone(kind: str) -> None:
    small = MemoryStore(1, before_image_bytes=100)
    with create_tables(JOINED[kind](MemoryStore(1), small), SPEC) as store:
        store.create_table(fixed())
        commit(store, {"t": update(np.arange(1_000), 8)})
        pin = store.pin()
        assert len(store.pins()) == 1
        commit(store, {"t": update(np.arange(1_000), 8)})
        assert store.pins() == ()
        with pytest.raises(StaleVersion, match="given up"):
            pin.lookup({"t": np.arange(10)})
        # The other one keeps its part still, and nothing is cleared on one alone.
        for call in (lambda: store.clear("t"), lambda: store.reset_version(9), lambda: store.drop_table("t")):
            with pytest.raises(BadInput, match="pinned"):
                call()
        assert (store.row_count("t"), store.version()) == (1_000, 2)
        pin.close()
        store.clear("t")


def test_a_pin_ends_with_its_store(tmp_path: Path) -> None:
    store = create_tables(file_store(tmp_path / "rows", MIB, 1), SPEC)
    commit(store, {"t": update(np.arange(100), 8)})
    pin, rows = store.pin(), rows_by_id(store, "t")
    commit(store, {"t": update(np.arange(100), 8)})
    store.flush()
    assert rows_by_id(pin, "t") == rows  # type: ignore[arg-type]
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        pin.lookup({"t": int64(1)})
    pin.close()
    with file_store(tmp_path / "rows", MIB, 1) as again:
        assert (again.version(), again.pins()) == (2, ())
        with pytest.raises(StaleVersion, match="version 1"):
            again.pin(1)


@pytest.mark.parametrize("order", [1, -1])
def test_what_one_of_several_stores_let_go_of_is_known_by_its_time(order: int) -> None:
    ending, lasting = PinStatistics(2, 0.002, 1, 10), PinStatistics(2, 59.9, 4, 40)
    still_both = [ending, lasting][::order]
    for pins in ([still_both, [lasting]], [[lasting], still_both]):
        assert joined_pins(pins) == (PinStatistics(2, 59.9, 8, 80),)
    assert joined_pins([still_both, still_both[::-1]]) == (
        PinStatistics(2, 59.9, 8, 80),
        PinStatistics(2, 0.002, 2, 20),
    )
    assert joined_pins([still_both, []]) == ()


LEASE_S = 600.0  # which no machine is too slow for: what counts is that it begins anew


def filled() -> MemoryStore:
    store = create_tables(MemoryStore(threads=1), fixed())
    commit(store, {"cities": update(int64(1, 2), 4)})
    return store


def until_renewed(store: MemoryStore) -> None:
    (lease,) = store._pins._leases[1]
    for _ in range(2):
        ends = lease.ends
        until(lambda: lease.ends > ends)  # noqa: B023 - it is waited for here


def test_a_pin_outlives_its_lease_until_its_keeper_is_closed() -> None:
    with filled() as store:
        pin = store.pin(lease_s=LEASE_S)
        with PinKeeper(pin, 0.01, "a test") as keeper:
            commit(store, {"cities": update(int64(3, 4), 4)})
            until_renewed(store)
            assert keeper.pin.row_count("cities") == 2
            assert keeper.gone is None
        assert store.pins() == ()
        keeper.close()


def test_a_pin_that_is_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with filled() as store, PinKeeper(store.pin(), 0.01, "a test") as keeper, caplog.at_level(logging.WARNING):
        commit(store, {"cities": update(int64(1, 2), 4)})
        keeper.pin.close()
        until(lambda: keeper.gone is not None)
        assert "the pin of version 1 is gone: it was released" in str(keeper.gone)
    assert caplog.messages == []


def test_a_store_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled() as store:
        pin = store.pin(lease_s=LEASE_S)
        renew, failures = pin.renew, [Unavailable("redis at 1.2.3.4 broke")]

        def away(lease_s: float | None = None) -> None:
            if failures:
                raise failures.pop()
            renew(lease_s)

        def broken(self: Snapshot) -> None:
            raise Unavailable("redis at 1.2.3.4 is gone")

        monkeypatch.setattr(pin, "renew", away)
        with caplog.at_level(logging.WARNING), PinKeeper(pin, 0.01, "a test") as keeper:
            until_renewed(store)
            assert keeper.gone is None
            assert [kept_pin.version for kept_pin in store.pins()] == [1]
            monkeypatch.setattr(type(pin), "close", broken)
        monkeypatch.undo()
        assert caplog.messages == [
            "the pin for a test was not renewed: redis at 1.2.3.4 broke",
            "the pin for a test ends with its lease: redis at 1.2.3.4 is gone",
        ]


class Leased(History):
    """Pins whose leases end, in the middle of a scan, too."""

    calls = (*History.calls, "wait", "wait_in_a_scan", "renew")

    def __init__(self, kind: str, held: ExitStack) -> None:
        folder, self.now, self.ends = quick_folder(), 0.0, dict[Snapshot, float]()
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        if kind == "files":
            store = file_store(folder / "store")
        elif kind == "crowded":
            store = crowded_store(held, DictTier(), folder / "log")
        else:
            store = MemoryStore(2, direct_bytes=0 if kind == "indexed" else 1 << 20)
        store._pins = StorePins(store._tables, 1 << 30, lambda: self.now)
        super().__init__(store)

    def wait(self, random: Random) -> None:
        self.now += float(random.choice([0.5, 5.0, 30.0]))
        for pin, _ in self.pins:
            if self.ends[pin] <= self.now:
                with pytest.raises(StaleVersion, match=f"version {pin.version()}"):
                    pin.lookup({"fixed": np.arange(3)})
        self.pins = [one for one in self.pins if self.ends[one[0]] > self.now]

    def wait_in_a_scan(self, random: Random) -> None:
        if self.pins:
            pin, _ = self.pins[0]
            blocks = pin.scan("dynamic", 1)
            more = pin.row_count("dynamic") > len(list(islice(blocks, 1)))
            self.wait(random)
            if self.ends[pin] <= self.now and more:
                with pytest.raises(StaleVersion):
                    next(blocks)

    def renew(self, random: Random) -> None:
        if self.pins:
            pin, _ = self.pins[-1]
            lease = float(random.choice([2.0, 20.0]))
            pin.renew(lease)
            self.ends[pin] = self.now + lease

    def pin(self, random: Random) -> None:
        super().pin(random)
        self.ends.setdefault(self.pins[-1][0], self.now + 60)

    def pin_again(self, random: Random) -> None:
        super().pin_again(random)
        if self.pins:
            self.ends.setdefault(self.pins[-1][0], self.now + 60)

    def close(self) -> None:
        self.release()
        assert isinstance(self.store, MemoryStore)
        assert all(not table.versions.pinned for table in self.store._tables.values())
        super().close()


@settings(max_examples=examples(32))
@given(programs(Leased), st.sampled_from(["direct", "indexed", "files", "crowded"]))
def test_pins_whose_leases_end_in_any_history(program: Program, kind: str) -> None:
    with ExitStack() as held:
        Leased(kind, held).play(program)
