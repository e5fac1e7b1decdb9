"""What every store promises of pins: a version that stays exactly as it was, whatever is changed after it."""

import threading
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
)
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, BadInput, FutureVersion, IdOutOfRange, StaleVersion, TableNotFound
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.embedding_store.tables.lookups import Bags
from tests.contracts.store_samples import commit, dynamic, fixed, int64, rows_by_id, update
from tests.threads import on_threads
from tests.waiting import until

CITIES = fixed(optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
PEOPLE = dynamic(optimizer=OptimizerSpec.of("adam", learning_rate=0.01))
PLACES, FOLK = np.arange(100), np.arange(-60, 60) * 10**15


def read(source: Snapshot, version: int | None = None) -> dict[str, bytes]:
    return {name: rows.tobytes() for name, rows in source.lookup({"cities": PLACES, "people": FOLK}, version).items()}


def whole(source: Snapshot, tables: Iterable[str] = ("cities", "people")) -> dict[str, object]:
    """Everything that a store or a pin says about some tables."""
    found: dict[str, object] = {}
    for name in tables:
        rows = rows_by_id(source, name, 7)  # type: ignore[arg-type]
        assert source.row_count(name) == len(rows)
        touches = {
            one: touch.tolist()
            for block in source.scan(name)
            if block.touches is not None
            for one, touch in zip(block.ids.tolist(), block.touches, strict=True)
        }
        found[name] = rows, touches, source.table_state(name)
    return found


class PinContract:
    @pytest.fixture
    def pinning(self, store: EmbeddingStore) -> EmbeddingStore:
        """The store, two tables with rows in it, at version 2."""
        for spec in (CITIES, PEOPLE):
            store.create_table(spec)
        for seed in range(2):
            commit(store, self.change(seed))
        return store

    def change(self, seed: int) -> dict[str, TableUpdate]:
        random = np.random.default_rng(seed)
        some, others = random.permutation(PLACES)[:40], random.permutation(FOLK)[:50]
        return {"cities": update(some, 4, seed), "people": update(others, 5, seed)}

    def test_a_pinned_version_stays_as_it_was(self, pinning: EmbeddingStore) -> None:
        rows, before = read(pinning), whole(pinning)
        with pinning.pin() as pin:
            assert pin.version() == 2
            assert set(pin.specs()) == {"cities", "people"}
            for seed in range(2, 6):
                commit(pinning, self.change(seed))
                assert (read(pin), read(pin, 2), read(pinning, 2)) == (rows, rows, rows)
            assert whole(pin) == before
            assert read(pinning) != rows
            assert pinning.version() == 6
            with pytest.raises(StaleVersion, match=r"version 3 is past.*6.*pinned are 2"):
                pinning.lookup({"cities": PLACES}, 3)
        with pytest.raises(StaleVersion, match=r"version 2 is past.*6.*no version is pinned"):
            pinning.lookup({"cities": PLACES}, 2)

    def test_bags_of_a_pinned_version(self, pinning: EmbeddingStore) -> None:
        table = pinning.table("people")
        rows = [
            Bags(FOLK.reshape(-1, 6), "mean"),
            Bags(FOLK[:9], "sum", offsets=[0, 4, 4, 9], weights=np.linspace(-1, 1, 9, dtype=np.float32)),
            FOLK.reshape(2, -1),
        ]
        before = [table.lookup(of) for of in rows]
        with pinning.pin():
            for seed in range(2, 4):
                commit(pinning, self.change(seed))
            for of, expected in zip(rows, before, strict=True):
                np.testing.assert_array_equal(table.lookup(of, version=2), expected)
                assert (table.lookup(of) != expected).any()

    def test_first_touches_deletions_and_put_rows_do_not_show_in_a_pin(self, pinning: EmbeddingStore) -> None:
        before, rows = whole(pinning), read(pinning)
        held, fresh = set(rows_by_id(pinning, "people")), int64(7, 8, 9)
        with pinning.pin() as pin:
            first = initial_rows(PEOPLE, fresh)
            commit(pinning, {"people": update(fresh, 5)})
            np.testing.assert_array_equal(pin.lookup({"people": fresh})["people"], first)
            assert (pinning.lookup({"people": fresh})["people"] != first).any()
            pinning.delete("people", np.array([*list(held)[::2], *list(held)[:3], 8, 12345], np.int64))
            weights, slots = np.full((3, 4), 9, np.float32), np.full((3, 4), 8, np.float32)
            pinning.put("cities", [RowBlock(int64(1, 50, 99), weights, slots)])
            assert (read(pin), whole(pin)) == (rows, before)
            commit(pinning, self.change(9))
            assert (read(pin), read(pinning, 2), whole(pin)) == (rows, rows, before)
            block = pin.read_rows("people", np.array([7, *held, 8], np.int64))
            assert block.ids.tolist() == list(held)

    def test_rows_changed_without_a_commit_after_a_pin_of_the_current_version(self, pinning: EmbeddingStore) -> None:
        before, rows = whole(pinning), read(pinning)
        with pinning.pin() as pin:
            pinning.delete("cities", PLACES[::3])
            assert read(pinning) != rows  # the version is committed, and this is what became of it
            assert (read(pin), whole(pin)) == (rows, before)

    def test_admission_and_eviction_do_not_show_in_a_pin(self, store: EmbeddingStore) -> None:
        specs = (
            TableSpec("admits", 4, optimizer=OptimizerSpec.of("adagrad"), admission=AdmissionSpec(2, 1 << 12)),
            TableSpec("evicts", 4, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(max_age=1)),
            TableSpec("rare", 4, eviction=EvictionSpec(min_frequency=2, every=3)),
            TableSpec("timed", 4, eviction=EvictionSpec(ttl=1.0)),
        )
        for spec in specs:
            store.create_table(spec)
        names = [spec.name for spec in specs]

        def step(seed: int) -> None:
            ids = np.random.default_rng(seed).permutation(np.arange(-12, 12))[:9]
            commit(store, {name: update(ids, 4, seed) for name in names}, time=100 + 0.4 * seed)

        reported: list[tuple[Snapshot, dict[str, object]]] = []
        for seed in range(14):
            step(seed)
            if seed % 3 == 1:
                reported.append((store.pin(), whole(store, names)))
            for pin, expected in reported:
                assert whole(pin, names) == expected
            if seed % 5 == 4:
                reported.pop(1 if seed == 4 else 0)[0].close()

    def test_pins_of_one_version_are_counted_apart(self, pinning: EmbeddingStore) -> None:
        rows = read(pinning)
        first, second = pinning.pin(), pinning.pin(2)
        commit(pinning, self.change(2))
        third = pinning.pin(2)  # pinned, though not current
        assert [pin.version for pin in pinning.pins()] == [2, 2, 2]
        assert all(0 < pin.lease_left_s <= 60 for pin in pinning.pins())
        first.close()
        first.close()
        with pytest.raises(StaleVersion, match=r"version 2.*released"):
            first.lookup({"cities": PLACES})
        for call in (lambda: first.row_count("cities"), first.renew, lambda: list(first.scan("cities"))):
            with pytest.raises(StaleVersion, match="version 2"):
                call()
        assert read(second) == read(third) == rows
        second.close()
        assert read(third) == rows
        third.close()
        assert pinning.pins() == ()
        with pytest.raises(StaleVersion, match="version 2"):
            pinning.pin(2)

    def test_what_is_kept_is_reported(self, pinning: EmbeddingStore) -> None:
        with pinning.pin():
            (pin,) = pinning.pins()
            assert (pin.version, pin.rows) == (2, 0)
            commit(pinning, self.change(2))
            commit(pinning, self.change(2))
            (pin,) = pinning.pins()
            assert pin.rows >= 90
            assert pin.bytes >= 40 * 4 * 8 + 50 * 4 * 15
        assert pinning.pins() == ()

    def test_versions_that_cannot_be_pinned(self, pinning: EmbeddingStore) -> None:
        with pytest.raises(StaleVersion, match=r"version 1 is past.*2"):
            pinning.pin(1)
        with pytest.raises(FutureVersion, match="version 3"):
            pinning.pin(3)
        for lease in (0, -1.0, float("nan")):
            with pytest.raises(BadInput, match="lease_s"):
                pinning.pin(lease_s=lease)
        assert pinning.pins() == ()
        with pinning.pin() as pin:
            with pytest.raises(TableNotFound, match="'towns'"):
                pin.lookup({"towns": PLACES})
            for call in (pin.row_count, pin.scan, pin.table_state):
                with pytest.raises(TableNotFound, match="'towns'"):
                    list(call("towns") or ())  # type: ignore[arg-type]
            with pytest.raises(IdOutOfRange, match="100"):
                pin.lookup({"cities": int64(100)})
            with pytest.raises(BadIds, match="'cities'"):
                pin.read_rows("cities", np.zeros(1, np.int32))
            with pytest.raises(BadInput, match="block_rows"):
                list(pin.scan("cities", 0))
            with pytest.raises(StaleVersion, match="version 1"):
                pin.lookup({"cities": PLACES}, 1)
            with pytest.raises(BadInput, match="lease_s"):
                pin.renew(0)

    def test_a_lease_ends_by_itself(self, pinning: EmbeddingStore) -> None:
        kept = pinning.pin(lease_s=5)
        kept.renew(60)
        left = pinning.pin(lease_s=0.05)
        until(lambda: len(pinning.pins()) == 1)
        (pin,) = pinning.pins()
        assert pin.lease_left_s > 5
        with pytest.raises(StaleVersion, match=r"version 2.*lease of 0\.05 s"):
            left.lookup({"cities": PLACES})
        with pytest.raises(StaleVersion, match="version 2"):
            left.renew()
        left.close()
        commit(pinning, self.change(2))
        kept.row_count("cities")
        kept.close()

    def test_versions_between_are_released(self, pinning: EmbeddingStore) -> None:
        pins, reported = [], []
        for seed in range(2, 8):
            pins.append(pinning.pin())
            reported.append((read(pinning), whole(pinning)))
            commit(pinning, self.change(seed))
        for gone in (3, 1, 0, 5, 2):
            pins[gone].close()
            pins[gone] = None  # type: ignore[call-overload]
            for pin, (rows, before) in zip(pins, reported, strict=True):
                if pin is not None:
                    assert read(pin) == read(pinning, pin.version()) == rows
                    assert whole(pin) == before
        pins[4].close()
        assert pinning.pins() == ()

    def test_a_scan_half_way_gives_each_row_once(self, pinning: EmbeddingStore) -> None:
        expected = {name: rows_by_id(pinning, name) for name in ("cities", "people")}
        for name in expected:
            with pinning.pin() as pin:
                expected[name] = rows_by_id(pinning, name)
                found: dict[int, tuple[bytes, bytes]] = {}
                for number, block in enumerate(pin.scan(name, 5)):
                    assert 0 < len(block.ids) <= 5
                    for one, weights, slots in zip(block.ids.tolist(), block.weights, block.slots, strict=True):
                        assert one not in found
                        found[one] = (weights.tobytes(), slots.tobytes())
                    commit(pinning, self.change(100 + number))
                    ids = PLACES if name == "cities" else FOLK
                    pinning.delete(name, ids[number::7])
                    if number == 3 and name == "people":
                        commit(pinning, {name: update(np.arange(1, 1500), 5)})
                    if number % 3 == 0:
                        pinning.pin().close()
                assert found == expected[name]

    def test_what_would_break_a_pin_is_refused(self, pinning: EmbeddingStore) -> None:
        with pinning.pin() as pin:
            before = whole(pin)
            for call in (
                lambda: pinning.clear("cities"),
                lambda: pinning.drop_table("people"),
                lambda: pinning.reset_version(7),
            ):
                with pytest.raises(BadInput, match=r"pinned.*2"):
                    call()
            assert (pinning.version(), whole(pin)) == (2, before)
            pinning.create_table(fixed("later"))
            commit(pinning, {"later": update(int64(1, 2), 4)})
        pinning.clear("cities")
        pinning.drop_table("people")
        pinning.reset_version(7)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_narrow_rows_are_kept_as_they_read(self, store: EmbeddingStore, dtype: str) -> None:
        store.create_table(
            TableSpec("t", 5, None, dtype, InitializerSpec("normal", 0.0, 0.1), 3, OptimizerSpec.of("adam"))
        )
        commit(store, {"t": update(FOLK[:80], 5)})
        rows, before = store.lookup({"t": FOLK})["t"], whole(store, ["t"])
        with store.pin() as pin:
            for seed in range(3):
                commit(store, {"t": update(FOLK[20:], 5, seed)})
            np.testing.assert_array_equal(pin.lookup({"t": FOLK})["t"], rows)
            assert whole(pin, ["t"]) == before

    def test_readers_of_a_pin_beside_commits_see_its_version(self, store: EmbeddingStore) -> None:
        store.create_table(
            TableSpec("t", 8, 256, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"))
        )
        ids, done = np.arange(256), threading.Event()

        def step() -> None:
            commit(store, {"t": TableUpdate(ids, np.full((256, 8), -1, np.float32))}, rate=1.0)

        def look(pin: Snapshot) -> None:
            while not done.is_set():
                for rows in (pin.lookup({"t": ids})["t"], store.lookup({"t": ids}, pin.version())["t"]):
                    assert (rows == pin.version()).all(), f"{pin.version()} read from {rows.min()} to {rows.max()}"
                blocks = [block.weights for block in pin.scan("t", 100)]
                assert sum(map(len, blocks)) == 256
                assert (np.concatenate(blocks) == pin.version()).all()
                with store.pin() as passing:
                    assert (passing.lookup({"t": ids})["t"] == passing.version()).all()

        def train() -> None:
            for _ in range(10):
                step()
            done.set()

        pins = []
        for _ in range(3):
            step()
            pins.append(store.pin())
        on_threads([train, *(partial(look, pin) for pin in pins)], done)
        for pin in pins:
            pin.close()
