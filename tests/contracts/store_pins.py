"""What every store promises of pins: a version that stays exactly as it was, whatever is changed after it."""

import threading
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import (
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
)
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, BadInput, FutureVersion, IdOutOfRange, StaleVersion, TableNotFound
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
        kept = pinning.pin(lease_s=60)
        kept.renew(600)
        left = pinning.pin(lease_s=0.05)
        until(lambda: len(pinning.pins()) == 1)
        (pin,) = pinning.pins()
        assert pin.lease_left_s > 60
        with pytest.raises(StaleVersion, match=r"version 2.*lease of 0\.05 s"):
            left.lookup({"cities": PLACES})
        with pytest.raises(StaleVersion, match="version 2"):
            left.renew()
        left.close()
        commit(pinning, self.change(2))
        kept.row_count("cities")
        kept.close()

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
