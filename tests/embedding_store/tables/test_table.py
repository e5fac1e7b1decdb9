"""A table's lookups: rows, bags and ragged bags equal a naive loop, on every kind of store."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import Bags, EmbeddingStore, MemoryStore, RowBlock, initial_rows
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadIds, BadInput, IdOutOfRange, SpecConflict, TableNotFound
from elastable.embedding_store.tables.table import EmbeddingTable

SGD = OptimizerSpec.of("sgd")


def naive_bags(rows: Float32, offsets: Int64, weights: Float32 | None, combiner: str) -> Float32:
    """The left fold in float32, one id after the other."""
    out = np.zeros((len(offsets) - 1, rows.shape[1]), np.float32)
    for bag in range(len(out)):
        divisor = np.float32(0)
        for i in range(offsets[bag], offsets[bag + 1]):
            weight = np.float32(1) if weights is None else weights[i]
            out[bag] = out[bag] + rows[i] * weight
            divisor = divisor + (weight if combiner == "mean" else weight * weight)
        if combiner != "sum":
            divisor = divisor if combiner == "mean" else np.sqrt(divisor)
            out[bag] = out[bag] / divisor if divisor else 0
    return out


def filled(store: EmbeddingStore, spec: TableSpec, ids: Int64) -> EmbeddingTable:
    table = store.table(spec)
    weights = np.random.default_rng(len(ids)).normal(size=(len(ids), spec.dim)).astype(np.float32)
    table.put([RowBlock(ids, weights, np.empty((len(ids), 0), np.float32))])
    return table


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("direct_bytes", [1 << 20, 0], ids=["direct", "indexed"])
def test_rows_and_bags_equal_a_naive_loop(direct_bytes: int, dtype: str) -> None:
    """Dims of EmbeddingTables.jl's own tests; tables that are full, partly filled, and of any id."""
    random = np.random.default_rng(7)
    ids = random.integers(0, 200, 400)
    ragged = np.concatenate([[0, 0], np.sort(random.integers(0, 400, 60)), [400, 400]])
    weights = random.normal(size=400).astype(np.float32) ** 2
    with MemoryStore(threads=2 if direct_bytes else 1, direct_bytes=direct_bytes) as store:
        for dim, size, present in product((20, 80, 1504), (200, None), (np.arange(200), np.arange(0, 200, 3))):
            table = filled(store, TableSpec(f"{dim}{size}{len(present)}", dim, size, dtype, optimizer=SGD), present)
            rows = store.lookup({table.name: ids})[table.name]
            np.testing.assert_array_equal(table.lookup(ids.reshape(50, 8)), rows.reshape(50, 8, dim))
            for combiner, of in product(("sum", "mean", "sqrtn"), (None, weights)):
                expected = naive_bags(rows, ragged, of, combiner)
                found = table.lookup(ids, combiner=combiner, offsets=ragged, weights=of)
                np.testing.assert_array_equal(found, expected)
                np.testing.assert_array_equal(table.lookup(Bags(ids, combiner, ragged, of)), expected)
                matrix = None if of is None else of.reshape(50, 8)
                equal = naive_bags(rows, np.arange(0, 401, 8), of, combiner)
                np.testing.assert_array_equal(
                    table.lookup(ids.reshape(50, 8), combiner=combiner, weights=matrix), equal
                )


def test_ids_of_any_shape_and_kind_and_none() -> None:
    with MemoryStore() as store:
        table = filled(store, TableSpec("t", 20, 200, optimizer=SGD), np.arange(0, 200, 3))
        ids = np.array([[3, 7, 3], [0, 199, 8]])
        rows = store.lookup({"t": ids.ravel()})["t"].reshape(2, 3, 20)
        for given_ids in (
            ids,
            ids.tolist(),
            ids.astype(np.uint8),
            np.asfortranarray(ids),
            np.repeat(ids, 2, 1)[:, ::2],
        ):
            np.testing.assert_array_equal(table.lookup(given_ids), rows)
        np.testing.assert_array_equal(table.lookup(7), rows[0, 1])
        assert table.lookup([]).shape == (0, 20)
        assert table.lookup(np.empty((3, 0), np.int64)).shape == (3, 0, 20)
        for combiner in ("sum", "mean", "sqrtn"):
            assert not table.lookup([], combiner=combiner, offsets=[0, 0, 0]).any()
            assert table.lookup([], combiner=combiner, offsets=[0]).shape == (0, 20)
            assert table.lookup(np.empty((3, 0), np.int64), combiner=combiner).tolist() == [[0.0] * 20] * 3
            assert not table.lookup([4, 5], combiner=combiner, offsets=[0, 2], weights=[0.0, 0.0]).any()
        assert table.delete([[3, 6], [6, 7]]) == 2
        assert table.delete([]) == 0
        assert (table.statistics().rows, len(table)) == (65, 65)


# -- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": np.empty((3, 4), np.float64)}, "out must be float32"),
        ({"out": np.empty((3, 5), np.float32)}, r"out must be float32 \[3, 4\], got float32 \[3, 5\]"),
        ({"out": [[0.0] * 4] * 3}, "got list"),
        ({"out": np.empty((4, 3), np.float32).T}, "C-contiguous, got strides"),
        ({"out": np.empty((3, 8), np.float32)[:, ::2]}, "C-contiguous"),
        ({"out": np.broadcast_to(np.float32(0), (3, 4))}, "read-only"),
        ({"combiner": "max"}, r"'max'; known combiners are sum, mean, sqrtn"),
        ({"combiner": "sum"}, "a combiner needs bags"),
        ({"offsets": [0, 3]}, "a combiner is needed"),
        ({"weights": np.ones(3, np.float32)}, "a combiner is needed"),
        ({"combiner": "sum", "offsets": [1, 3]}, r"begin with 0, got offsets\[0\] = 1"),
        ({"combiner": "sum", "offsets": [0, 2, 1, 3]}, r"ascend, got offsets\[2\] = 1 after offsets\[1\] = 2"),
        ({"combiner": "sum", "offsets": [0, 2]}, r"end with the number of ids, 3; got offsets\[1\] = 2"),
        ({"combiner": "sum", "offsets": [0, 4]}, "end with the number of ids"),
        ({"combiner": "sum", "offsets": []}, r"integers \[n \+ 1\]"),
        ({"combiner": "sum", "offsets": [0.0, 3.0]}, "integers"),
        ({"combiner": "sum", "offsets": [[0, 3]]}, "integers"),
        ({"combiner": "sum", "offsets": [0, 3], "weights": np.ones(2, np.float32)}, r"float32 \[3\], as the ids are"),
        ({"combiner": "sum", "offsets": [0, 3], "weights": np.ones(3)}, "weights must be float32"),
        ({"ids": [1.5, 2.0, 3.0]}, r".*id 1\.5 is no integer"),
        ({"ids": [[1, 2], [3]], "combiner": "sum"}, "ids must be integers of one shape"),
        ({"ids": [1, None, 3]}, "ids must be integers"),
        ({"ids": "three"}, "ids must be integers"),
        ({"ids": [1, 2, 2**70]}, "ids must be integers"),
        ({"combiner": "sum", "offsets": [[0], [1, 2]]}, "offsets must be numbers of one shape"),
        ({"combiner": "sum", "offsets": [0, 3], "weights": [[1], [1, 2]]}, "weights must be numbers of one shape"),
        ({"combiner": "sum", "offsets": [0, 3], "weights": ["a", "b", "c"]}, "weights must be numbers"),
        ({"ids": [[1, 2]], "combiner": "sum", "offsets": [0, 2]}, r"with offsets ids must be \[m\]"),
        ({"ids": Bags([[1, 2]]), "combiner": "sum"}, "Bags hold"),
        ({"ids": [1, 100, 3]}, r"id 100 at position 1 is outside 0 <= id < 100"),
        ({"ids": [1, -1, 3], "combiner": "sum", "offsets": [0, 1, 3]}, "id -1 at position 1"),
    ],
)
def test_what_is_refused_names_what_is_wrong(change: dict[str, object], message: str) -> None:
    with MemoryStore(threads=1) as store:
        table = store.table(TableSpec("t", 4, 100))
        arguments = {"ids": [1, 2, 3], **change}
        with pytest.raises(BadInput, match=rf"table 't'.*{message}") as caught:
            table.lookup(**arguments)  # type: ignore[arg-type]
        kinds = {"ids": BadIds, "offsets": BadIds, "id ": IdOutOfRange}
        assert all(isinstance(caught.value, kind) for word, kind in kinds.items() if message.startswith(word))
        assert len(table) == 0


def test_an_output_over_the_ids_is_refused() -> None:
    memory = np.zeros(64, np.int64)
    out = memory[:12].view(np.float32).reshape(6, 4)
    with MemoryStore(threads=1) as store:
        table = store.table(TableSpec("t", 4, 100))
        with pytest.raises(BadInput, match="out overlaps the ids"):
            table.lookup(memory[10:16], out)
        with pytest.raises(BadInput, match="out overlaps the weights"):
            table.lookup(np.zeros((6, 1), np.int64), out, combiner="sum", weights=out.reshape(-1)[:6].reshape(6, 1))
        with pytest.raises(BadInput, match="out overlaps the offsets"):
            table.lookup([], out, combiner="sum", offsets=memory[:7])
        assert not memory.any()


def test_tables_are_found_made_and_refused() -> None:
    spec = TableSpec("t", 4, 100)
    with MemoryStore(threads=1) as store:
        with pytest.raises(TableNotFound, match="'t'; tables here: none"):
            store.table("t")
        assert store.table(spec).spec == store.table("t").spec == spec
        with pytest.raises(SpecConflict, match="dim"):
            store.table(TableSpec("t", 5, 100))
        assert repr(store.table("t")) == "<EmbeddingTable 't': 100 rows x 4 float32 in MemoryStore>"
        assert (store.table("t").name, store.table("t").dim) == ("t", 4)


# -- any bags, any threads


@given(st.data())
def test_any_bags_equal_the_naive_loop_on_any_number_of_threads(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 40), "dim")
    size = data.draw(st.sampled_from([None, 50]), "vocabulary")
    present = data.draw(st.lists(st.integers(0, 49), unique=True), "present")
    ids = np.array(data.draw(st.lists(st.integers(0, 49), max_size=60), "ids"), np.int64)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=12), "cuts")
    offsets = np.array([0, *sorted(cuts), len(ids)])
    combiner = data.draw(st.sampled_from(["sum", "mean", "sqrtn"]), "combiner")
    weights = None
    if data.draw(st.booleans(), "weighted"):
        floats = st.floats(0, 4, width=32, allow_subnormal=False)
        weights = np.array(data.draw(st.lists(floats, min_size=len(ids), max_size=len(ids)), "weights"), np.float32)
    with MemoryStore(threads=data.draw(st.integers(1, 3), "threads")) as store:
        table = filled(store, TableSpec("t", dim, size, optimizer=SGD), np.array(present, np.int64))
        rows = table.lookup(ids)
        found = table.lookup(ids, combiner=combiner, offsets=offsets, weights=weights)
        np.testing.assert_array_equal(found, naive_bags(rows, offsets, weights, combiner))


@pytest.mark.parametrize("size", [30_000, None])
def test_large_lookups_are_the_same_for_any_number_of_threads(size: int | None) -> None:
    """Large enough for several pieces, and for rows that are written past the caches."""
    random = np.random.default_rng(3)
    ids = random.integers(0, 30_000, 60_000)
    offsets = np.concatenate([[0], np.sort(random.integers(0, 60_000, 5_000)), [60_000]])
    weights = random.normal(size=60_000).astype(np.float32)
    present = np.arange(0, 30_000, 2)
    found = []
    for threads in (1, 3):
        with MemoryStore(threads=threads) as store:
            table = filled(store, TableSpec("t", 48, size, optimizer=SGD), present)
            rows = table.lookup(ids)
            unaligned = np.zeros(60_000 * 48 + 1, np.float32)[1:].reshape(60_000, 48)
            np.testing.assert_array_equal(table.lookup(ids, unaligned), rows)
            bags = table.lookup(ids, combiner="sqrtn", offsets=offsets, weights=weights)
            found.append((rows.tobytes(), bags.tobytes()))
            own = initial_rows(table.spec, ids)
            live = ids % 2 == 0
            own[live] = next(iter(table.scan(30_000))).weights[ids[live] // 2]
            np.testing.assert_array_equal(rows, own)
    assert found[0] == found[1]


@pytest.mark.parametrize(("bad", "position"), [(60, 0), (60, 70_001), (2**63 - 1, 199_999), (-(2**63), 70_001)])
@pytest.mark.parametrize("present", [0, 20, 50])
def test_an_id_outside_is_named_as_the_first_of_all(bad: int, position: int, present: int) -> None:
    ids = np.zeros(200_000, np.int64)
    ids[[-1, position]] = -3, bad
    with MemoryStore(threads=3) as store:
        table = filled(store, TableSpec("t", 32, 50, optimizer=SGD), np.arange(present))
        for combiner, of in ((None, ids), ("sum", ids.reshape(-1, 4)), ("mean", ids.reshape(-1, 10))):
            with pytest.raises(IdOutOfRange, match=f"table 't': id {bad} at position {position} is outside"):
                table.lookup(of, combiner=combiner)
        assert len(table) == present
