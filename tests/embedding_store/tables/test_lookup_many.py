"""Many tables at once: every strategy equals separate lookups, joined."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from elastable.embedding_store import Bags, LookupStrategy, MemoryStore, OptimizerSpec, RowBlock, TableSpec, lookup_many
from elastable.embedding_store.errors import BadInput, FutureVersion, IdOutOfRange
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tables.table import EmbeddingTable
from tests.untyped import Keywords

SGD = OptimizerSpec.of("sgd")
ROWS = 500


@pytest.fixture
def tables(redis_url: str) -> Iterator[list[EmbeddingTable]]:
    """Tables of several widths, stores and kinds; the first appears twice."""
    random = np.random.default_rng(1)
    with (
        MemoryStore(threads=2) as memory,
        MemoryStore(threads=1, direct_bytes=0) as other,
        open_store(redis_url) as redis,
    ):
        made = [
            memory.table(TableSpec("a", 16, 1000, optimizer=SGD)),
            other.table(TableSpec("b", 5, 1000, optimizer=SGD)),
            memory.table(TableSpec("c", 33, None, optimizer=SGD)),
            redis.table(TableSpec("d", 8, None, optimizer=SGD)),
        ]
        for table in made:
            weights = random.normal(size=(900, table.dim)).astype(np.float32)
            table.put([RowBlock(np.arange(900), weights, np.empty((900, 0), np.float32))])
        yield [*made, made[0]]


@pytest.fixture
def wanted() -> list[object]:
    random = np.random.default_rng(2)
    offsets = np.concatenate([[0], np.sort(random.integers(0, 700, ROWS - 1)), [700]])
    return [
        random.integers(0, 1000, ROWS),
        Bags(random.integers(0, 1000, (ROWS, 12)), "mean"),
        Bags(random.integers(-5, 1000, 700), "sqrtn", offsets, random.random(700, np.float32)),
        random.integers(0, 1000, ROWS).tolist(),
        Bags(random.integers(0, 1000, (ROWS, 2))),
    ]


def test_every_strategy_equals_separate_lookups(tables: list[EmbeddingTable], wanted: list[Any]) -> None:
    separate = [table.lookup(of) for table, of in zip(tables, wanted, strict=True)]
    for strategy in ("sequential", "one-thread-per-table"):
        found = lookup_many(tables, wanted, strategy)
        assert len(found) == len(separate)
        for one, other in zip(found, separate, strict=True):
            np.testing.assert_array_equal(one, other)
        given = [np.full_like(rows, np.nan) for rows in separate]
        found = lookup_many(tables, wanted, strategy, given)
        for one, to, other in zip(found, given, separate, strict=True):
            assert np.shares_memory(one, to)
            np.testing.assert_array_equal(to, other)
    np.testing.assert_array_equal(lookup_many(tables, wanted), np.concatenate(separate, axis=1))


@pytest.mark.parametrize("free", [0, 1, 16])
def test_columns_before_the_tables_are_left_free(tables: list[EmbeddingTable], wanted: list[Any], free: int) -> None:
    joined = np.concatenate([table.lookup(of) for table, of in zip(tables, wanted, strict=True)], axis=1)
    found = lookup_many(tables, wanted, "preallocated", prepend_columns=free)
    assert not found[:, :free].any()
    np.testing.assert_array_equal(found[:, free:], joined)
    out = np.full((ROWS, free + joined.shape[1]), 7, np.float32)
    assert lookup_many(tables, wanted, "preallocated", out, prepend_columns=free) is out
    assert (out[:, :free] == 7).all()
    np.testing.assert_array_equal(out[:, free:], joined)


def test_no_ids_at_all(tables: list[EmbeddingTable]) -> None:
    for strategy in ("sequential", "one-thread-per-table"):
        found = lookup_many(tables[:2], [[], np.empty((0, 3), np.int64)], strategy)
        assert [rows.shape for rows in found] == [(0, 16), (0, 3, 5)]
        found = lookup_many(tables[:2], np.empty((0, 2), np.int64), strategy)
        assert [rows.shape for rows in found] == [(0, 16), (0, 5)]
    assert lookup_many(tables[:2], [[], []]).shape == (0, 21)


def test_large_tables_side_by_side() -> None:
    """Large enough for several threads, and to be written past the caches into columns of a wider buffer."""
    random = np.random.default_rng(5)
    ids = [random.integers(0, 3_000, 40_000) for _ in range(3)]
    with MemoryStore(threads=3) as store:
        tables = [store.table(TableSpec(name, dim, 3_000)) for name, dim in (("a", 32), ("b", 17), ("c", 64))]
        for free in (0, 3, 4):
            found = lookup_many(tables, ids, "preallocated", prepend_columns=free)
            joined = np.concatenate([table.lookup(of) for table, of in zip(tables, ids, strict=True)], axis=1)
            np.testing.assert_array_equal(found[:, free:], joined)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "parallel"}, "'parallel'; known strategies are sequential, one-thread-per-table, preallocated"),
        ({"ids": [[1, 2]]}, "2 tables, ids for 1"),
        ({"tables": [], "ids": []}, "at least one table"),
        ({"ids": [[1, 2], [1, 2, 3]]}, "need one number of rows; got 'a': 2, 'b': 3"),
        ({"ids": [[[1, 2]], [1]]}, r"'a'.*ids \[n\] or Bags, got ids \[1, 2\]"),
        ({"ids": [Bags([1, 2], "sum", []), [1, 2]]}, "need one number of rows"),
        ({"ids": [3, [1, 2]]}, r"ids \[n\] or Bags, got ids \[\]"),
        ({"ids": [Bags([1, 2]), [1, 2]]}, "'a': a combiner needs bags"),
        ({"prepend_columns": -1}, "must not be negative, got -1"),
        ({"strategy": "sequential", "prepend_columns": 2}, "prepend_columns is for strategy 'preallocated'"),
        ({"out": np.empty((2, 6), np.float32)}, r"float32 \[2, 7\].*got float32 \[2, 6\]"),
        ({"out": np.empty((2, 7))}, "got float64"),
        ({"out": np.empty((7, 2), np.float32).T}, "C-contiguous and writable"),
        ({"out": [np.empty((2, 4), np.float32)]}, "got list"),
        ({"strategy": "sequential", "out": np.empty((2, 7), np.float32)}, "a sequence of 2 arrays"),
        ({"strategy": "sequential", "out": [np.empty((2, 4), np.float32)]}, "a sequence of 2 arrays"),
        ({"strategy": "sequential", "out": [np.empty((2, 4), np.float32)] * 2}, r"'b': out must be float32 \[2, 3\]"),
    ],
)
def test_what_is_refused_names_what_is_wrong(change: Keywords, message: str) -> None:
    with MemoryStore(threads=1) as store:
        tables = [store.table(TableSpec("a", 4, 100)), store.table(TableSpec("b", 3, 100))]
        arguments = {"tables": tables, "ids": [[1, 2], [3, 4]], **change}
        with pytest.raises(BadInput, match=message):
            lookup_many(**arguments)


@pytest.mark.parametrize("strategy", ["preallocated", "sequential", "one-thread-per-table"])
def test_one_array_for_all_tables_has_a_column_for_each(tables: list[EmbeddingTable], strategy: LookupStrategy) -> None:
    for rows in (3, 5):  # 5: a square, which tells nobody by its shape which way it is meant
        matrix = np.random.default_rng(rows).integers(0, 900, (rows, 5))
        columns = [table.lookup(matrix[:, number]) for number, table in enumerate(tables)]
        for found in (
            lookup_many(tables, matrix, strategy),
            lookup_many(tables, matrix, strategy, axis=1),
            lookup_many(tables, np.ascontiguousarray(matrix.T), strategy, axis=0),
            lookup_many(tables, list(matrix.T), strategy),
        ):
            if strategy == "preallocated":
                np.testing.assert_array_equal(found, np.concatenate(columns, axis=1))
            else:
                assert all(np.array_equal(one, other) for one, other in zip(found, columns, strict=True))


@pytest.mark.parametrize(
    ("ids", "axis", "message"),
    [
        (np.zeros((5, 3), int), None, r"ids \[5, 3\] for 5 tables: give \[n, 5\].*\[5, n\] with axis=0; got axis=1"),
        (np.zeros((3, 5), int), 0, "got axis=0"),
        (np.zeros((5, 5), int), 2, "got axis=2"),
        (np.zeros(5, int), None, r"ids \[5\] for 5 tables"),
        ([[1]] * 5, 0, "axis=0 is for one array of all tables' ids; got list"),
    ],
)
def test_an_array_that_fits_no_tables(tables: list[EmbeddingTable], ids: Any, axis: int | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        lookup_many(tables, ids, axis=axis)


def test_outputs_that_overlap_are_refused() -> None:
    with MemoryStore(threads=1) as store:
        table = store.table(TableSpec("a", 4, 100))
        out = np.zeros((3, 4), np.float32)
        with pytest.raises(BadInput, match="outputs of tables 'a' and 'a' overlap"):
            lookup_many([table, table], [[1, 2], [3, 4]], "sequential", [out[:2], out[1:]])
        assert not out.any()


def test_an_error_of_one_table_reaches_the_caller() -> None:
    with MemoryStore(threads=1) as store:
        tables = [store.table(TableSpec(name, 4, 100)) for name in "abcd"]
        for bad in range(4):
            ids = [[100] if number == bad else [1] for number in range(4)]
            for strategy in ("sequential", "one-thread-per-table", "preallocated"):
                with pytest.raises(IdOutOfRange, match=f"table {tables[bad].name!r}: id 100"):
                    lookup_many(tables, ids, strategy)
        with pytest.raises(FutureVersion):
            lookup_many(tables, [[1]] * 4, version=3)
