"""Where rows and columns lie: the host-embedding document's cases, and that splitting can be undone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import MemoryStore, PartitionedStore
from elastable.embedding_store.composite.partitions import (
    encoding_columns,
    global_ids,
    partition,
    partition_of_shards,
    split_ids,
)
from elastable.embedding_store.contract.spec import EvictionSpec, OptimizerSpec, ShardOrigin, TableSpec
from elastable.embedding_store.errors import BadSpec, StoreFailed, Unsupported

INT64 = st.integers(-(2**63), 2**63 - 1)
DOCUMENT = [(14, 64, 4), (13, 7, 4), (5, 3, 8), (1, 1, 2)]
"""(rows, dim, shards), the host-embedding document's."""


@given(st.lists(INT64 | st.integers(-20, 20), max_size=60), st.sampled_from([1, 2, 3, 4, 5, 7, 8, 64, 1000]))
def test_ids_are_split_by_floor_division_and_come_back(ids: list[int], shards: int) -> None:
    local, places, ends = split_ids(np.array(ids, np.int64), shards)
    starts = [0, *ends[:-1]]
    assert sorted(places.tolist()) == list(range(len(ids)))
    for shard, (start, end) in enumerate(zip(starts, ends, strict=True)):
        wanted = [(place, one // shards) for place, one in enumerate(ids) if one % shards == shard]
        assert list(zip(places[start:end].tolist(), local[start:end].tolist(), strict=True)) == wanted
        back = global_ids(local[start:end], shards, shard)
        assert back.tolist() == [ids[place] for place, _ in wanted]


@pytest.mark.parametrize(("rows", "dim", "shards"), DOCUMENT)
def test_encoding_shards_of_the_document(rows: int, dim: int, shards: int) -> None:
    columns = encoding_columns(dim, shards)
    width = -(-dim // shards)
    padded = np.full((rows, width * shards), np.nan)  # a peer padded by dim mod n instead of its complement
    padded[:, :dim] = np.arange(rows * dim).reshape(rows, dim)
    for shard, part in enumerate(columns):
        block = padded[:, shard * width : (shard + 1) * width]
        np.testing.assert_array_equal(block[:, ~np.isnan(block[0])], padded[:, part])
    assert [one for part in columns for one in range(dim)[part]] == list(range(dim))


def test_how_a_table_was_split_is_read_from_its_shards() -> None:
    for strategy in ("token", "encoding"):
        table = partition(TableSpec("t", 5, 3), strategy, 4)
        found, lacking_none = partition_of_shards("t", table.shards)
        assert (found.spec, found.strategy, found.shards) == (table.spec, strategy, table.shards)
        assert lacking_none == []
        lacking = [None if number == 1 else spec for number, spec in enumerate(table.shards)]
        assert partition_of_shards("t", lacking)[1] == [1]
        swapped = [table.shards[number] for number in (1, 0, 2, 3)]
        with pytest.raises(StoreFailed, match="another order"):
            partition_of_shards("t", swapped)
        with pytest.raises(StoreFailed, match="split over 4 shards, and 2 are given"):
            partition_of_shards("t", table.shards[:2])
    with pytest.raises(StoreFailed, match="shard 1 of 2 holds a table 't' that was not split"):
        partition_of_shards("t", [None, TableSpec("t", 4)])
    with pytest.raises(StoreFailed, match="not split"):
        partition_of_shards("t", [TableSpec("t", 4, origin=ShardOrigin(2, 0))])


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(BadSpec, match=r"'t'.*'rows'.*token, encoding"):
        partition(TableSpec("t", 4), "rows", 2)
    with pytest.raises(BadSpec, match="at least one shard"):
        partition(TableSpec("t", 4), "token", 0)
    with pytest.raises(BadSpec, match="unknown optimizer 'magic'"):
        partition(TableSpec("t", 4, optimizer=OptimizerSpec("magic")), "token", 2)
    budget = TableSpec("t", 4, eviction=EvictionSpec(max_rows=9))
    with PartitionedStore([MemoryStore(), MemoryStore()]) as alone:
        with pytest.raises(Unsupported, match=r"'t'.*max_rows.*token.*--stores"):
            alone.create_table(budget)
        assert alone.specs() == {}
    with PartitionedStore([MemoryStore(), MemoryStore()], "encoding") as by_columns:
        by_columns.create_table(budget)
    partition(budget, "token", 2)
    partition(TableSpec("t", 4, dtype="int8"), "token", 2)
    with pytest.raises(Unsupported, match=r"'t'.*int8.*encoding"):
        partition(TableSpec("t", 4, dtype="int8"), "encoding", 2)
