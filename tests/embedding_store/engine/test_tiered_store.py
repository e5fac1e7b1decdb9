"""A store with a tier is flushed and killed at any moment, with any budget, and nobody can tell it from a plain one."""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastable.embedding_store import MemoryStore, TableSpec
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableUpdate
from elastable.embedding_store.contract.tier import Records, TierTable
from elastable.embedding_store.engine import store_tier, table_rows
from elastable.embedding_store.errors import NotReady, StaleVersion, StoreBroken, Unavailable
from elastable.embedding_store.log.contract import Buffer, LogEntry, NoLog
from elastable.embedding_store.log.file_log import FileLog
from tests.contracts.store_history import MOST, SPECS, TRAINED, Program, Random, everything, programs
from tests.contracts.store_samples import create_tables
from tests.embedding_store.engine.test_store_history import Reopened, step
from tests.embedding_store.engine.tiered_stores import flushed, tiered_store
from tests.embedding_store.tiers.dict_tier import DictTier
from tests.file_stores import quick_folder
from tests.plugins.seeds import examples

TINY, HUGE = 1, 1 << 30


@pytest.fixture(autouse=True)
def _few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "_LEAST_FRAMES", 1)


class Flushed(Reopened):
    """Its store has a tier: it is flushed, also in part, and killed."""

    calls = (*Reopened.calls, "flush", "break_off_a_flush")

    def __init__(self, budget: int, keeps_positions: bool) -> None:
        self.budget, self.tier, folder = budget, DictTier(keeps_positions=keeps_positions), quick_folder()
        super().__init__(folder, tiered_store(self.tier, FileLog(folder / "0"), budget))

    def flush(self, random: Random) -> None:
        assert isinstance(self.store, MemoryStore)
        self.store.flush()
        status = flushed(self.store)
        assert (status.changed_rows, status.flushed_version) == (0, self.store.version())

    def break_off_a_flush(self, random: Random) -> None:
        assert isinstance(self.store, MemoryStore)
        self.tier.left = int(random.integers(41))
        with suppress(Unavailable):
            self.store.flush()
        self.tier.left = None

    def kill(self, random: Random) -> None:
        record, folder = self.store.record(), self.copied()
        tier = self.tier.copy()
        self.tier.left = 0
        with suppress(Unavailable):
            self.store.close()
        self.tier = tier
        self.open_again(lambda: tiered_store(tier, FileLog(folder), self.budget), record)


@settings(max_examples=examples(96), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs(Flushed), st.sampled_from([TINY, 1_000, HUGE]), st.booleans())
def test_a_store_with_a_tier_is_flushed_and_killed_at_any_moment(
    program: Program, budget: int, keeps_positions: bool
) -> None:
    Flushed(budget, keeps_positions).play(program)


def trained(store: MemoryStore, steps: int = 4) -> None:
    create_tables(store, *SPECS.values())
    for seed in range(steps):
        step(store, [seed, 5, 9 - seed], seed, TRAINED)


def test_without_a_log_a_store_comes_back_as_it_was_flushed_or_not_at_all(tmp_path: Path) -> None:
    tier = DictTier(keeps_positions=True)
    with tiered_store(tier, NoLog(), TINY) as store:
        trained(store)
        before = everything(store)
    with tiered_store(tier, NoLog(), TINY) as store:
        assert everything(store) == before
        step(store, [1, 2], 1, TRAINED)
        store.flush()
        flushed, of_it = everything(store), tier.copy()
        step(store, [3], 2, TRAINED)
        tier.left = 2
        with pytest.raises(Unavailable):
            store.flush()
        tier.left = None
        killed = tier.copy()
        after = everything(store)
    with tiered_store(tier, NoLog(), HUGE) as store:
        assert everything(store) == after
    with tiered_store(of_it, NoLog(), HUGE) as store:
        assert everything(store) == flushed
    with pytest.raises(StoreBroken, match="was not closed cleanly and has no log"):
        tiered_store(killed, NoLog(), TINY)


@pytest.mark.parametrize("then", ["look up", "commit"])
def test_frames_of_a_large_change_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    ids, ones = np.arange(5_000), np.ones((5_000, 2), np.float32)
    with tiered_store(DictTier(), FileLog(tmp_path), 1_000) as store, MemoryStore(1) as plain:
        for each in (store, plain):
            each.create_table(SPECS["dynamic"])
            each.put("dynamic", [RowBlock(ids, ones, ones)])
            each.commit(Commit(1, {"dynamic": TableUpdate(ids, ones)}, 0, {}))
        store.flush()
        table = store._tables["dynamic"]
        rows = table.rows
        assert rows._frames is not None
        store.lookup({"dynamic": ids[:1]})
        assert rows._frames.count == 5_000, "a change that needs as many may follow"
        monkeypatch.setattr(table_rows, "_SWOLLEN_S", 0.0)
        if then == "look up":
            store.lookup({"dynamic": ids[:1]})
        else:
            for each in (store, plain):
                each.commit(Commit(2, {"dynamic": TableUpdate(ids[:9], ones[:9])}, 1, {}))
        assert rows._frames.count < 100
        assert everything(store) == everything(plain)


def test_without_a_log_a_store_that_is_opened_again_keeps_its_pins(tmp_path: Path) -> None:
    """Nobody else has changed it: its first change reads nothing anew."""
    tier = DictTier()
    with tiered_store(tier, NoLog(), TINY) as store:
        trained(store)
    with tiered_store(tier, NoLog(), TINY) as store, store.pin() as pin:
        before = pin.lookup({"dynamic": np.arange(9)})["dynamic"]
        step(store, [1, 2], 1, TRAINED)
        np.testing.assert_array_equal(pin.lookup({"dynamic": np.arange(9)})["dynamic"], before)


def test_a_log_that_has_lost_its_end_or_its_beginning_is_refused(tmp_path: Path) -> None:
    tier = DictTier()
    with tiered_store(tier, FileLog(tmp_path / "log"), HUGE) as store:
        trained(store, 2)
        store.flush()
        shutil.copytree(tmp_path / "log", tmp_path / "older")
        step(store, [1, 2], 1, TRAINED)
        tier.left = 3
        with pytest.raises(Unavailable):
            store.flush()
        tier.left = None
        broken_off = tier.copy()
    with pytest.raises(StoreBroken, match=r"has rows of log entry [0-9]+, but the log ends with"):
        tiered_store(broken_off, FileLog(tmp_path / "older"), HUGE)
    with pytest.raises(StoreBroken, match="it was lost or is another store's"):
        tiered_store(tier.copy(), FileLog(tmp_path / "another"), HUGE)


def test_commits_wait_for_a_tier_that_is_slow_and_fail_where_it_is_gone(tmp_path: Path) -> None:
    tier = DictTier()
    with tiered_store(tier, FileLog(tmp_path, segment_bytes=4096), HUGE, log_bytes=20_000, timeout_s=3) as store:
        store.create_table(SPECS["dynamic"])
        for seed in range(300):
            step(store, list(range(MOST)), seed, ["dynamic"])
        status = flushed(store)
        assert status.log_bytes < 40_000
        assert status.flushed_version > 0
        tier.left = 0
        with pytest.raises(Unavailable, match="the log has reached log_bytes"):  # noqa: PT012 - some commit does
            for seed in range(300):
                step(store, list(range(MOST)), seed, ["dynamic"])
        tier.left = None
        before = everything(store)
    with tiered_store(tier, FileLog(tmp_path), HUGE) as store:
        assert everything(store) == before


def test_a_store_that_is_closed_waits_for_a_tier_that_is_away(tmp_path: Path) -> None:
    class Away(DictTier):
        tries = 0

        def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
            self.tries += 1
            if self.tries <= 3:
                raise NotReady("the Cluster is down")
            super().write(changed, deleted, sequence)

    tier = Away(keeps_positions=False)
    with tiered_store(tier, FileLog(tmp_path), HUGE, closing_s=60.0) as store:
        trained(store)
        before = everything(store)
    assert tier.tries > 3  # all of it is in the tier: the log has nothing left to apply
    with tiered_store(tier, FileLog(tmp_path), HUGE) as store:
        assert everything(store) == before


@pytest.mark.parametrize("budget", [TINY, HUGE])
def test_a_version_that_was_staged_can_be_taken_back_until_the_next_one_is(tmp_path: Path, budget: int) -> None:
    tier = DictTier()
    with tiered_store(tier, FileLog(tmp_path), budget) as store:
        trained(store, 3)
        before = everything(store)
        ids = np.array([3, 4])
        change = {"dynamic": TableUpdate(ids, np.ones((2, 2), np.float32))}
        store.stage(Commit(4, change, 3, {}))()
        store.flush()
        assert flushed(store).flushed_version < 4, "a version that may be taken back was written"
        assert store.recover(3) == 2
        assert everything(store) == before
        store.stage(Commit(4, change, 3, {}))()
        store.stage(Commit(5, {}, 4, {}))
        after = everything(store)
        store.flush()
        assert flushed(store).flushed_version == 4
    with tiered_store(tier, FileLog(tmp_path), budget) as store:
        assert everything(store) == after


class _SlowTier(DictTier):
    def __init__(self) -> None:
        super().__init__()
        self.slow = ""
        self.reached, self.go_on = threading.Event(), threading.Event()

    def _stop(self, where: str) -> None:
        if self.slow == where:
            self.slow = ""
            self.reached.set()
            assert self.go_on.wait(60)

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        self._stop("rows")
        super().write(changed, deleted, sequence)

    def put_state(self, state: bytes) -> None:
        self._stop("state")
        super().put_state(state)


@pytest.mark.parametrize("slow", ["rows", "state"])
def test_a_version_that_is_being_written_is_not_taken_back_meanwhile(tmp_path: Path, slow: str) -> None:
    """Else the tier had rows, or a state, of changes that are in no log: the store could not be opened any more."""
    tier = _SlowTier()
    with tiered_store(tier, FileLog(tmp_path), HUGE) as store:
        trained(store, 3)
        tier.slow = slow
        with ThreadPoolExecutor(2) as pool:
            flushed = pool.submit(store.flush)
            assert tier.reached.wait(60)
            taken_back = pool.submit(store.recover, 2)
            assert not wait([taken_back], 0.2).done
            tier.go_on.set()
            with pytest.raises(StaleVersion):
                taken_back.result(60)
            flushed.result(60)
        before = everything(store)
        assert store.version() == 3
    with tiered_store(tier, FileLog(tmp_path), HUGE) as store:
        assert everything(store) == before


def test_a_pass_writes_nothing_of_a_commit_that_was_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "_CHUNK_BYTES", 1)  # some rows at a time
    tier, log = _SlowTier(), _LosingLog()

    def update(ids: Int64) -> dict[str, TableUpdate]:
        return {"dynamic": TableUpdate(ids, np.ones((len(ids), 2), np.float32))}

    with tiered_store(tier, log, HUGE) as store, MemoryStore(1) as plain:
        for each in (store, plain):
            each.create_table(SPECS["dynamic"])
            each.commit(Commit(1, update(np.arange(400)), 0, {}))
        store.flush()
        for each in (store, plain):
            each.commit(Commit(2, update(np.arange(200)), 1, {}))
        tier.slow = "rows"
        with ThreadPoolExecutor(2) as pool:
            flushed = pool.submit(store.flush)
            assert tier.reached.wait(60)
            log.lost = "before"
            with pytest.raises(Unavailable):
                store.commit(Commit(3, update(np.arange(200, 400)), 2, {}))
            log.lost = None
            recovered = pool.submit(store.recover)
            wait([recovered], 0.2)
            tier.go_on.set()
            recovered.result(60)
            flushed.result(60)
        expected = everything(plain)
        assert everything(store) == expected
    with tiered_store(tier, log, HUGE) as store:
        assert everything(store) == expected


def test_a_process_that_takes_over_goes_on_from_what_the_other_one_wrote(tmp_path: Path) -> None:
    tier = DictTier()
    with tiered_store(tier, FileLog(tmp_path / "a"), HUGE) as store:
        trained(store, 2)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with tiered_store(tier, FileLog(tmp_path / "b"), HUGE) as other:
            step(store, [1, 2], 1, TRAINED)
            store.flush()
            shutil.rmtree(tmp_path / "b")
            with pytest.raises(StoreBroken):  # its log is not the one that the rows were logged in
                step(other, [4], 1, TRAINED)


class _LosingLog(NoLog):
    """A log that answers nothing on request, whether the entry is there or not."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, bytes]] = []
        self.lost: str | None = None

    keeps_entries = True
    first = 1

    def append(self, sequence: int, version: int, parts: Sequence[Buffer]) -> None:
        content = b"".join(parts)
        del self.kept[sequence - 1 :]  # an entry in doubt is taken back
        if self.lost != "before":
            self.kept.append((version, content))
        if self.lost is not None:
            raise Unavailable("no answer")
        super().append(sequence, version, parts)

    def entries(self, after: int = 0) -> Iterator[LogEntry]:
        for number, (version, content) in enumerate(self.kept[: self.last], 1):
            if number > after:
                yield LogEntry(number, version, memoryview(content))


@pytest.mark.parametrize("lost", ["before", "after"])
@pytest.mark.parametrize("again", [True, False])
def test_a_commit_that_could_not_be_logged_is_seen_by_nobody_and_made_again(lost: str, again: bool) -> None:
    log = _LosingLog()
    with tiered_store(DictTier(), log, TINY) as store, MemoryStore(1, direct_bytes=100) as plain:
        for each in (store, plain):
            trained(each, 3)
        before, pin = everything(store), store.pin()
        pinned = pin.lookup({"dynamic": np.arange(9)})["dynamic"]
        log.lost = lost
        update = {"dynamic": TableUpdate(np.array([1, 7]), np.ones((2, 2), np.float32))}
        refused = Commit(4, update, 3, {}, time=1004.0)
        for _ in range(2):
            with pytest.raises(Unavailable):
                store.commit(refused)
            assert store.version() == 3
            with pytest.raises(Unavailable, match="version 4 is not logged"):
                store.lookup({"dynamic": np.array([1])})
        log.lost = None
        if again:
            store.commit(refused)
            plain.commit(refused)
            np.testing.assert_array_equal(pin.lookup({"dynamic": np.arange(9)})["dynamic"], pinned)
        else:
            store.recover()
            assert everything(store) == before
            with pytest.raises(StaleVersion, match="version 4 could not be logged and was taken back"):
                pin.lookup({"dynamic": np.arange(9)})
        pin.close()
        for each in (store, plain):
            step(each, [2, 3], 5, TRAINED)
        assert everything(store) == everything(plain)
        log.lost = lost
        for change in (
            lambda: store.delete("dynamic", np.array([1])),
            lambda: store.clear("few"),
            lambda: store.drop_table("half"),
            lambda: store.reset_version(9),
            lambda: store.create_table(TableSpec("new", 2)),
            lambda: store.put("dynamic", store.scan("dynamic")),
            lambda: store.put_table_state("decayed", TableState(untouched_decay=-0.5)),
        ):
            with pytest.raises(Unavailable):
                change()
        log.lost = None
        assert everything(store) == everything(plain)


class LosingTier(DictTier):
    """Makes each table, and the first time it seems to have failed."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = set[str]()

    def create(self, table: TierTable) -> None:
        super().create(table)
        if table.name not in self.lost:
            self.lost.add(table.name)
            raise Unavailable("no answer")


def test_tables_that_were_made_without_an_answer_are_written() -> None:
    tier = LosingTier()
    with tiered_store(tier, NoLog(), HUGE) as store:
        trained(store)
        for _ in TRAINED:
            with pytest.raises(Unavailable):
                store.flush()
        store.flush()
        before = everything(store)
    assert len(tier.lost) == len(TRAINED)
    with tiered_store(tier.copy(), NoLog(), HUGE) as again:
        assert everything(again) == before
