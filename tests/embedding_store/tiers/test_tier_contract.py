"""What every tier promises, whatever keeps its records. A new tier is one line in `PLACES`."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.errors import BadInput, SpecConflict, TableNotFound
from tests.embedding_store.tiers.tier_places import (
    Place,
    dict_places,
    everything,
    module_places,
    page_places,
    records,
    redis_places,
)
from tests.plugins.seeds import examples
from tests.threads import on_threads

PLACES: dict[str, tuple[Callable[[Any], Iterator[Place]], str]] = {
    "dict": (dict_places, "tmp_path"),
    "page": (page_places, "tmp_path"),
    "files": (
        partial(module_places, "elastable.embedding_store.tiers.files.file_tier", "FileTier", fsync=False),
        "tmp_path",
    ),
    "redis": (redis_places, "redis_url"),
    "valkey": (redis_places, "valkey_url"),
    "cluster": (redis_places, "redis_cluster_url"),
    "sentinel": (redis_places, "redis_sentinel_url"),
}
"""Empty places for tiers, made of a fixture's value."""

OUTSIDE = [name for name in PLACES if name not in ("dict", "page", "sentinel")]
"""Tiers that outlive this process; how a server is found does not matter to it."""


@pytest.fixture(params=PLACES)
def places(request: pytest.FixtureRequest) -> Iterator[Place]:
    return places_of(request)


@pytest.fixture
def place(places: Iterator[Place]) -> Place:
    return next(places)


@pytest.fixture(params=OUTSIDE)
def outside(request: pytest.FixtureRequest) -> Place:
    return next(places_of(request))


def places_of(request: pytest.FixtureRequest) -> Iterator[Place]:
    places, fixture = PLACES[request.param]
    return places(request.getfixturevalue(fixture))


IDS = st.sampled_from([-(2**63), -1, 0, 1, 2, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)
NAMES = st.sampled_from(["", "a", "../up", "a b\n:{}*/é", "x" * 300]) | st.text(max_size=20)
MOST_POSITIONS = 400


class Model:
    def __init__(self, table: TierTable) -> None:
        self.table = table
        self.rows = dict[int, bytes]()
        self.positions = dict[int, int]()


class TierInAnyHistory(RuleBasedStateMachine):
    places: Iterator[Place]

    def __init__(self) -> None:
        super().__init__()
        self.place = next(self.places)
        self.tier = self.place.open()
        self.models = dict[str, Model]()
        self.sequence = 0
        self.state: bytes | None = None

    def teardown(self) -> None:
        self.tier.close()

    def choose(self, data: st.DataObject) -> Model:
        return self.models[data.draw(st.sampled_from(sorted(self.models)), "table")]

    @initialize(record_bytes=st.integers(1, 4096))
    def first_table(self, record_bytes: int) -> None:
        self.create("first", record_bytes, b"", 0.5)

    @rule(
        name=NAMES,
        record_bytes=st.integers(1, 80) | st.integers(1, 4096),
        description=st.binary(max_size=20),
        first=st.floats(0, 1),
    )
    def create(self, name: str, record_bytes: int, description: bytes, first: float) -> None:
        table = TierTable(name, record_bytes, description, int(first * record_bytes))
        if name in self.models:
            with pytest.raises(SpecConflict):
                self.tier.create(table)
        else:
            self.tier.create(table)
            self.models[name] = Model(table)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.models)) | NAMES) if self.models else "none"
        self.tier.drop(name)
        self.models.pop(name, None)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), more=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
    def write(self, data: st.DataObject, more: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        changed, deleted = [], {}
        for name in {self.choose(data).table.name, self.choose(data).table.name}:
            model = self.models[name]
            known = st.sampled_from(sorted(model.rows)) if model.rows else IDS
            gone = data.draw(st.lists(known | IDS, max_size=5, unique=True), "deleted")
            if gone:
                elsewhere = MOST_POSITIONS + 1  # some have no record
                positions = [model.positions.get(row_id, elsewhere + at) for at, row_id in enumerate(gone)]
                deleted[name] = (np.array(gone, np.int64), np.array(positions, np.int64))
            for row_id in gone:
                model.rows.pop(row_id, None)
                model.positions.pop(row_id, None)
            ids = data.draw(st.lists(known | IDS, max_size=8, unique=True), "changed")
            free = [at for at in random.permutation(MOST_POSITIONS).tolist() if at not in model.positions.values()]
            for row_id in ids:
                if row_id not in model.positions:
                    model.positions[row_id] = free.pop()
            rows = random.integers(0, 256, (len(ids), model.table.record_bytes), np.uint8)
            model.rows.update(zip(ids, (row.tobytes() for row in rows), strict=True))
            changed.append(records(name, ids, [model.positions[row_id] for row_id in ids], rows))
        self.sequence += more
        self.tier.write(changed, deleted, self.sequence)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        wanted = []
        for _ in range(2):
            model = self.choose(data)
            known = st.sampled_from(sorted(model.rows)) if model.rows else IDS
            ids = data.draw(st.lists(known | IDS, max_size=8, unique=True), "ids")
            positions = [model.positions.get(row_id, MOST_POSITIONS + at) for at, row_id in enumerate(ids)]
            width = data.draw(st.integers(0, model.table.record_bytes) | st.just(model.table.record_bytes), "width")
            wanted.append(records(model.table.name, ids, positions, width))
        for asked, missing in zip(wanted, self.tier.read(wanted), strict=True):
            rows, width = self.models[asked.table].rows, asked.rows.shape[1]
            assert missing.dtype == np.int64
            assert sorted(asked.ids[missing].tolist()) == sorted(set(asked.ids.tolist()) - rows.keys())
            for row_id, row in zip(asked.ids.tolist(), asked.rows, strict=True):
                assert row.tobytes() == rows.get(row_id, b"\x4d" * width)[:width]

    @precondition(lambda self: self.models)
    @rule(data=st.data(), block_rows=st.integers(1, 5) | st.just(65_536))
    def scan(self, data: st.DataObject, block_rows: int) -> None:
        model = self.choose(data)
        size = model.table.record_bytes
        width = data.draw(st.none() | st.just(0) | st.integers(0, size), "width")
        shown = size if width is None else width
        found = everything(self.tier, model.table.name, block_rows, width)
        assert found == {row_id: row[:shown] for row_id, row in model.rows.items()}
        positions = {
            row_id: position
            for block in self.tier.scan(model.table.name, block_rows, 0)
            for row_id, position in zip(block.ids.tolist(), block.positions.tolist(), strict=True)
        }
        assert positions == (model.positions if self.tier.keeps_positions else dict.fromkeys(model.rows, -1))

    @rule(state=st.binary(max_size=40), more=st.booleans())
    def put_state(self, state: bytes, more: bool) -> None:
        state = state * 5_000 if more else state
        self.tier.put_state(state)
        self.state = state

    @rule()
    def reopen(self) -> None:
        """As after the death of a process: `close` saves nothing."""
        self.tier.close()
        self.tier.close()
        self.tier = self.place.open()

    @invariant()
    def says_what_it_holds(self) -> None:
        assert self.tier.tables() == {name: model.table for name, model in self.models.items()}
        assert self.tier.sequence == self.sequence
        assert self.tier.state() == self.state


def test_any_history(places: Iterator[Place]) -> None:
    run_state_machine_as_test(
        type("AnyHistory", (TierInAnyHistory,), {"places": places}),
        settings=settings(
            max_examples=examples(32),
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_tables_that_are_not_there_are_named(place: Place) -> None:
    with place.open() as tier:
        for use in (
            lambda: tier.read([records("no such", [1], [0], 4)]),
            lambda: tier.write([records("no such", [1], [0], 4)], {}, 1),
            lambda: list(tier.scan("no such")),
        ):
            with pytest.raises(TableNotFound, match="no such"):
                use()


@pytest.mark.parametrize("table", [("u", 0), ("u", 4, b"", 5), (["u"], 4)])
def test_a_table_that_cannot_be_is_refused(table: tuple[Any, ...]) -> None:
    with pytest.raises(BadInput, match="'u'"):
        TierTable(*table)


def test_what_is_no_record_is_refused_before_anything_is_written(outside: Place) -> None:
    ids, rows = np.arange(40), np.ones((40, 16), np.uint8)
    good = Records("t", ids, ids, rows)
    with outside.open() as tier:
        tier.create(TierTable("t", 16))
        for bad in (
            replace(good, rows=rows[:, :15]),
            replace(good, rows=np.ones((40, 17), np.uint8)),
            replace(good, rows=rows[:-1]),
            replace(good, rows=rows.astype(np.int8)),
            replace(good, rows=np.asfortranarray(rows)),
            replace(good, rows=rows.reshape(-1)),
            replace(good, positions=ids[1:]),
            replace(good, ids=ids.astype(np.int32)),
        ):
            with pytest.raises(BadInput, match=r"table 't': .* must be int64 \[40\] and C-contiguous uint8 \[40, 16\]"):
                tier.write([good, bad], {}, 1)
        with pytest.raises(BadInput, match=r"uint8 \[40, at most 16\]"):
            tier.read([replace(good, rows=np.zeros((40, 17), np.uint8))])
        for block_rows, width in ((0, None), (1, -1), (1, 17)):
            with pytest.raises(BadInput, match=f"block_rows={block_rows} must be at least 1"):
                tier.scan("t", block_rows, width)
        assert (everything(tier, "t"), tier.sequence) == ({}, 0)


def test_many_records_in_any_order(place: Place) -> None:
    """More than one block, one thread's part and one system call hold."""
    random = np.random.default_rng(3)
    ids, positions = random.permutation(20_000) - 10_000, random.permutation(40_000)[:20_000]
    rows = random.integers(0, 256, (20_000, 36), np.uint8)
    with place.open() as tier:
        tier.create(TierTable("t", 36, first_bytes=20))
        tier.write([records("t", ids, positions, rows)], {}, 1)
        again = random.permutation(20_000)[:9_000]
        rows[again] += 1
        tier.write([records("t", ids[again], positions[again], rows[again])], {}, 2)
    with place.open() as tier:
        wanted = records("t", ids[::-1], positions[::-1], 21)
        assert not len(tier.read([wanted])[0])
        np.testing.assert_array_equal(wanted.rows, rows[::-1, :21])
        assert everything(tier, "t", 7_000) == dict(zip(ids.tolist(), map(bytes, rows), strict=True))


def test_a_record_is_read_whole_while_it_is_written(place: Place) -> None:
    """Readers see each record as it was or as it is going to be: all its bytes are the number of a write."""
    ids, writes = np.arange(3_000), 30
    stop, seen = threading.Event(), set[int]()

    def read(tier: Tier) -> None:
        while not stop.is_set():
            wanted = records("t", ids, ids, 200)
            assert not len(tier.read([wanted])[0])
            assert (wanted.rows == wanted.rows[:, :1]).all()
            seen.update(np.unique(wanted.rows).tolist())

    def write(tier: Tier) -> None:
        for number in range(1, writes + 1):
            tier.write([records("t", ids, ids, np.full((len(ids), 200), number, np.uint8))], {}, number)
        stop.set()

    with place.open() as tier:
        tier.create(TierTable("t", 200, first_bytes=64))
        tier.write([records("t", ids, ids, np.zeros((len(ids), 200), np.uint8))], {}, 0)
        on_threads([partial(work, tier) for work in (write, read, read)], stop)
    assert seen <= set(range(writes + 1))


KILLED = """
import sys
import numpy as np
from elastable.embedding_store.contract.tier import Records
{imports}

ids = np.arange(2_000)
with {opened} as tier:
    for number in range(tier.sequence + 1, 1_000_000):
        tier.write([Records("t", ids, ids, np.full((len(ids), 600), number % 251, np.uint8))], {{}}, number)
        tier.put_state(str(number).encode() * 1_000)
        print(number, flush=True)
"""


@pytest.mark.process
def test_a_process_that_is_killed_while_it_writes_leaves_records_of_one_write_or_the_next(outside: Place) -> None:
    place, ids = outside, np.arange(2_000)
    assert place.program is not None
    imports, opened = place.program
    with place.open() as tier:
        tier.create(TierTable("t", 600))
    for kill in range(2):
        code = KILLED.format(imports=imports, opened=opened)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(3 + kill)]
            writer.kill()
            reported = [int(line) for line in [*lines, *writer.stdout] if line.endswith("\n")][-1]
        with place.open() as tier:
            assert tier.sequence - reported in (0, 1)
            assert tier.state() in [str(number).encode() * 1_000 for number in (reported, reported + 1)]
            found = everything(tier, "t")
            assert sorted(found) == ids.tolist()
            whole = {bytes([number % 251]) * 600 for number in (reported, tier.sequence)}
            assert len([row_id for row_id, row in found.items() if row not in whole]) <= 1
            tier.write([records("t", ids, ids, np.zeros((2_000, 600), np.uint8))], {}, tier.sequence + 1)
            tier.put_state(b"")
            assert set(everything(tier, "t").values()) == {bytes(600)}
