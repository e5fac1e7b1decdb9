"""The store contract: bags, and rows of many tables in one buffer, equal sums of looked-up rows."""

import numpy as np
import pytest

from elastable.embedding_store import Bags, lookup_many
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, FutureVersion, IdOutOfRange
from tests.contracts.store_samples import commit, dynamic, fixed, int64, update

IDS = int64(5, 3, 5, 99, 0, 7, 3, 3)
OFFSETS = int64(0, 3, 3, 8)
WEIGHTS = np.array([1, 0.5, 2, 0.25, 3, 1, 0.125, 7], np.float32)


def folded(rows: Float32, weights: Float32 | None) -> Float32:
    """The sums of three bags, as left folds in float32."""
    out = np.zeros((3, rows.shape[1]), np.float32)
    for bag in range(3):
        for i in range(OFFSETS[bag], OFFSETS[bag + 1]):
            out[bag] += rows[i] if weights is None else rows[i] * weights[i]
    return out


class BagContract:
    @pytest.mark.parametrize("kind", ["fixed", "dynamic"])
    def test_bags_are_left_folds_of_rows(self, store: EmbeddingStore, kind: str) -> None:
        spec = fixed() if kind == "fixed" else dynamic()
        table = store.table(spec)
        commit(store, {spec.name: update(int64(3, 5, 98), spec.dim)})
        rows = store.lookup({spec.name: IDS})[spec.name]
        np.testing.assert_array_equal(table.lookup(IDS.reshape(2, 4)), rows.reshape(2, 4, spec.dim))
        for weights in (None, WEIGHTS):
            expected = folded(rows, weights)
            out = np.full((3, spec.dim), np.nan, np.float32)
            assert table.lookup(IDS, out, combiner="sum", offsets=OFFSETS, weights=weights) is out
            np.testing.assert_array_equal(out, expected)
            divisors = np.array([3, 1, 5] if weights is None else [3.5, 1, 11.375], np.float32)
            mean = table.lookup(IDS, combiner="mean", offsets=OFFSETS, weights=weights)
            np.testing.assert_array_equal(mean, expected / divisors[:, None])
        assert table.row_count == 3

    def test_many_tables_in_one_buffer(self, store: EmbeddingStore) -> None:
        cities, people = store.table(fixed()), store.table(dynamic())
        commit(store, {"cities": update(int64(3, 5), 4), "people": update(int64(0, 7), 5)})
        bags = Bags(IDS, "sqrtn", OFFSETS, WEIGHTS)
        wanted: list[Int64 | Bags] = [int64(3, 99, 3), bags, bags]
        tables = [cities, people, cities]
        joined = np.concatenate([table.lookup(of) for table, of in zip(tables, wanted, strict=True)], axis=1)
        found = lookup_many(tables, wanted, prepend_columns=3, version=store.version())
        np.testing.assert_array_equal(found[:, 3:], joined)
        assert not found[:, :3].any()

    def test_bags_that_cannot_be(self, store: EmbeddingStore) -> None:
        cities = store.table(fixed())
        with pytest.raises(IdOutOfRange, match=r"'cities'.*\bid 100\b.*position 1\b"):
            cities.lookup([[1, 100]], combiner="sum")
        with pytest.raises(BadInput, match="ascend"):
            cities.lookup([1, 2], combiner="sum", offsets=[0, 2, 1, 2])
        with pytest.raises(FutureVersion):
            cities.lookup([[1, 2]], combiner="sum", version=1)
        assert len(cities) == 0
