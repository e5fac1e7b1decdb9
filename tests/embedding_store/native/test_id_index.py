"""The dynamic id index against a dictionary, and how it grows."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native import id_index
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.tiers.redis.schema import partition_of

_INT64 = np.iinfo(np.int64)
_WORD = 2**64 - 1


def claim(index: IdIndex, ids: Int64) -> Int64:
    positions = np.empty(len(ids), np.int64)
    index.reserve(len(ids))
    index.claim(ids, positions)
    return positions


def find(index: RowDirectory, ids: Int64) -> Int64:
    positions = np.empty(len(ids), np.int64)
    missing = index.find(ids, positions)
    assert missing == np.count_nonzero(positions < 0)
    return positions


def scanned(index: RowDirectory, limit: int) -> list[tuple[int, int]]:
    found, cursor = list[tuple[int, int]](), 0
    while True:
        ids, positions, cursor = index.scan(cursor, limit)
        if not len(ids):
            return found
        assert len(ids) <= limit
        found += zip(ids.tolist(), positions.tolist(), strict=True)


def unmixed(value: int) -> int:
    """The id whose hash in a new index is `value`: the inverse of splitmix64's finalizer."""

    def unshifted(x: int, by: int) -> int:
        y = x
        for _ in range(64 // by + 1):
            y = x ^ (y >> by)
        return y

    value = unshifted(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) & _WORD
    value = unshifted(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & _WORD
    value = unshifted(value, 30) ^ int(IdIndex()._state[id_index.SEED])
    return value - 2**64 if value >> 63 else value


def colliding(count: int) -> Int64:
    """Ids of one home line, however far the index has grown."""
    return np.array([unmixed(number << 24) for number in range(count)], np.int64)


ids_of_few = st.lists(
    st.integers(-30, 30) | st.sampled_from([_INT64.min, _INT64.min + 1, _INT64.max, 1 << 42, 3 << 42]), max_size=40
)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = IdIndex()
        self.model: dict[int, int] = {}

    def _claim(self, ids: Int64) -> None:
        self.index.reserve(len(ids))
        may_come = set(self.index.places(ids).tolist())
        positions = np.empty(len(ids), np.int64)
        fresh = self.index.claim(ids, positions)
        first = {one: i for i, one in reversed(list(enumerate(ids.tolist())))}
        expected = sorted(i for one, i in first.items() if one not in self.model)
        assert fresh.tolist() == expected
        for i in fresh.tolist():
            assert positions[i] in may_come
            assert positions[i] < self.index.capacity
            self.model[int(ids[i])] = int(positions[i])
        assert positions.tolist() == [self.model[one] for one in ids.tolist()]

    def _remove(self, ids: Int64) -> None:
        gone = sum(self.model.pop(one, None) is not None for one in ids.tolist())
        assert self.index.remove(ids) == gone

    @rule(ids=ids_of_few)
    def claims(self, ids: list[int]) -> None:
        self._claim(np.array(ids, np.int64))

    @rule(ids=ids_of_few)
    def removes(self, ids: list[int]) -> None:
        self._remove(np.array(ids, np.int64))

    @rule(start=st.integers(-(2**62), 2**62), step=st.sampled_from([1, 64, 1 << 20, (1 << 44) + 1]))
    def claims_a_thousand(self, start: int, step: int) -> None:
        self._claim(np.unique(start + step * np.arange(1000)))

    @rule(every=st.integers(1, 5))
    def removes_many(self, every: int) -> None:
        self._remove(np.array(list(self.model)[::every], np.int64))

    @rule()
    def clears(self) -> None:
        self.index.clear()
        self.model.clear()

    @invariant()
    def is_the_dictionary(self) -> None:
        assert self.index.count == len(self.model)
        assert len(set(self.model.values())) == len(self.model)
        known = np.array([*self.model, -31, _INT64.max - 1], np.int64)
        assert find(self.index, known).tolist() == [self.model.get(one, -1) for one in known.tolist()]
        assert sorted(scanned(self.index, 333)) == sorted(self.model.items())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=12, stateful_step_count=10, deadline=None)


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(40_000),
        -np.arange(1, 40_001),
        np.arange(40_000) << 40,
        np.arange(40_000) << 20 | 5,
        np.random.default_rng(3).integers(_INT64.min, _INT64.max, 40_000),
    ],
    ids=["ascending", "negative", "high bits", "low bits alike", "random"],
)
def test_it_grows_by_steps_and_stays_small(ids: Int64) -> None:
    index, moved, most = IdIndex(), 0, 0.0
    group = id_index.LINE_CELLS * id_index.GROUP_LINES
    for start in range(0, len(ids), 100):
        claim(index, ids[start : start + 100])
        # A hundred ids fill a small part of a segment: at most one group moves, whatever the size of the table.
        assert index.cells_moved - moved <= group
        moved = index.cells_moved
        if index.count >= 20_000:  # the first segments are larger than few rows need
            most = max(most, index.bytes / index.count)
    assert 24 < most <= 33, "as docs/stores.md and docs/tables.md say"
    assert find(index, ids).tolist() == list(range(len(ids)))
    assert moved <= 5 * len(ids)


def test_positions_of_removed_ids_are_given_again() -> None:
    index = IdIndex()
    claim(index, np.arange(10_000))
    for step in range(1, 6):
        gone = np.arange(0, 10_000, 2) + 10_000 * (step - 1) * (step > 1)
        gone = gone if step == 1 else np.array([one for one, _ in scanned(index, 999)][::2])
        assert index.remove(gone) == 5000
        claim(index, np.arange(5000) + 10**6 * step)
        assert index.count == index.positions_given == 10_000


def test_ids_made_to_collide_are_strewn_under_another_seed() -> None:
    index, ids = IdIndex(), colliding(5500)
    positions = claim(index, ids)
    assert positions.tolist() == list(range(5500))
    assert find(index, ids).tolist() == positions.tolist()
    assert index._state[id_index.SEED] != IdIndex()._state[id_index.SEED]
    assert index.remove(ids[::3]) == len(ids[::3])
    assert find(index, ids[1::3]).tolist() == positions[1::3].tolist()
    assert (find(index, ids[::3]) == -1).all()


@pytest.mark.parametrize("more", [0, 1, 2000])
def test_ids_that_do_not_fit_where_growth_spreads_them_are_found(more: int) -> None:
    """In three segments 3,500 ids whose hashes end in two zeros fit, as a third of them lies apart; not so in four."""
    low = np.array([unmixed(number << 50 | number << 2) for number in range(3500)], np.int64)
    other = np.array([unmixed(number << 50 | number << 2 | 1) for number in range(1825 + more)], np.int64)
    # With 3,994 ids there are three segments, with 5,325 there would be four.
    ids = np.concatenate([low[:2300], other[:1700], low[2300:], other[1700:]])
    index = IdIndex()
    positions = claim(index, ids)
    assert positions.tolist() == list(range(len(ids)))
    assert find(index, ids).tolist() == positions.tolist()
    assert index.count == len(ids) == len(set(scanned(index, 1000)))


def test_ids_of_one_partition_do_not_fall_together() -> None:
    ids = np.arange(400_000)
    ids = ids[partition_of(ids, 64) == 5]
    index = IdIndex()
    claim(index, ids)
    assert index._state[id_index.SEED] == IdIndex()._state[id_index.SEED]


def test_a_full_line_that_loses_a_cell_still_leads_to_the_next() -> None:
    ids = colliding(40)  # eight lines full, one after the other
    for first in range(0, 40, 3):
        index = IdIndex()
        positions = claim(index, ids)
        gone = np.roll(ids, -first)[:17]
        index.remove(gone)
        kept = ~np.isin(ids, gone)
        assert find(index, ids).tolist() == np.where(kept, positions, -1).tolist()


def test_positions_beyond_32_bits() -> None:
    index, ids = IdIndex(), np.arange(1000)
    index._state[id_index.HIGH] = 2**32 - 500
    claimed = np.empty(1000, np.int64)
    cells, state = index._cells.array, index._state
    cells_needed = np.zeros((4 * len(cells), 8), np.uint64)
    fresh, scratch = np.empty(1000, np.int64), np.empty((id_index.GROUP_LINES, 8), np.uint64)
    # The ids by position would fill 32 GiB: every position is kept at the place of its last bits.
    wrapped = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (2**33,), (0,))
    assert id_index._claim(cells_needed, wrapped, state, scratch, ids, claimed, fresh, 0) == (1000, 1000)
    assert claimed.tolist() == list(range(2**32 - 500, 2**32 + 500))
    found = np.empty(1000, np.int64)
    assert id_index._find(cells_needed, state, ids, found) == 0
    assert found.tolist() == claimed.tolist()


def test_more_rows_than_positions_can_count_are_refused() -> None:
    index = IdIndex()
    with pytest.raises(MemoryError, match="137438953473 rows"):
        index.reserve(2**37 + 1)
    assert claim(index, np.arange(3)).tolist() == [0, 1, 2]


def test_a_find_in_the_midst_of_a_change_stays_inside_its_memory() -> None:
    """As from another process: whatever the state says, nothing beyond the cells is read."""
    index, ids = IdIndex(), np.arange(5000)
    claim(index, ids)
    state, random = index._state, np.random.default_rng(4)
    positions = np.empty(len(ids), np.int64)
    for _ in range(200):
        torn = state.copy()
        torn[random.integers(0, 4)] = random.integers(0, 2**62) >> random.integers(0, 62)
        id_index._find(index._cells.array, torn, ids, positions)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_direct_rows(size: int) -> None:
    directory = DirectRows(size)
    random = np.random.default_rng(size)
    live: set[int] = set()
    for count in (0, *[1 + size // 3] * 4):
        ids = random.integers(0, size, count)
        positions = np.empty(count, np.int64)
        fresh = directory.claim(ids, positions)
        assert positions.tolist() == ids.tolist()
        assert set(ids[fresh].tolist()) == set(ids.tolist()) - live
        live |= set(ids.tolist())
        assert directory.count == len(live)
        whole = np.arange(size)
        expected = [one if one in live else -1 for one in range(size)]
        assert find(directory, whole).tolist() == expected
        assert find(directory, whole[:0]).tolist() == []
        assert scanned(directory, 7) == [(one, one) for one in sorted(live)]
    directory.clear()
    assert (directory.count, scanned(directory, 5)) == (0, [])
