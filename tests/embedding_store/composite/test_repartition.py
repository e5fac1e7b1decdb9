"""Tables moved between stores: what is refused, in what portions; the histories of stores say that rows stay."""

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, PartitionedStore, repartition
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, SpecConflict, StoreFailed, TableNotFound
from tests.contracts.store_samples import EXTREMES, commit, dynamic, fixed, rows_by_id, update


def partitioned(shards: int, strategy: str) -> PartitionedStore:
    return PartitionedStore([MemoryStore(threads=1) for _ in range(shards)], strategy)


def filled(store: EmbeddingStore) -> EmbeddingStore:
    store.create_table(fixed("cities", 7, optimizer=OptimizerSpec.of("adam")))
    store.create_table(dynamic("people", 3, optimizer=OptimizerSpec.of("rowwise_adagrad")))
    store.create_table(dynamic("nobody", 3))
    random = np.random.default_rng(2)
    for seed in range(3):
        people = np.concatenate([EXTREMES, random.integers(-1000, 1000, 40)])
        commit(store, {"cities": update(random.permutation(100)[:60], 7, seed),
                       "people": update(np.unique(people), 3, seed)})  # fmt: skip
    return store


def test_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastable.embedding_store.composite.moving._BLOCK_BYTES", 1000)
    with filled(MemoryStore(threads=1)) as before, partitioned(3, "token") as after:
        reported: list[tuple[str, int, int]] = []
        repartition(before, after, tables=["cities"], progress=lambda *step: reported.append(step))
        rows = 1000 // (4 * 21)
        count = before.row_count("cities")
        assert [done for _, done, _ in reported] == [*range(rows, count, rows), count]
        assert {total for _, _, total in reported} == {count}
        assert after.specs().keys() == {"cities"}
        assert rows_by_id(after, "cities") == rows_by_id(before, "cities")


def test_a_target_with_rows_is_refused_unless_asked() -> None:
    with filled(MemoryStore(threads=1)) as before, partitioned(2, "encoding") as after:
        after.create_table(before.specs()["people"])
        commit(after, {"people": update(np.arange(5000, 5004), 3)})
        with pytest.raises(BadInput, match=r"4 rows in table 'people' already; replace=True"):
            repartition(before, after)
        assert (set(after.specs()), after.row_count("people"), after.version()) == ({"people"}, 4, 1)
        repartition(before, after, replace=True)
        assert rows_by_id(after, "people") == rows_by_id(before, "people")


def test_what_cannot_be_copied() -> None:
    with filled(MemoryStore(threads=1)) as before, partitioned(2, "token") as after:
        with pytest.raises(TableNotFound, match=r"'towns'.*cities, nobody, people"):
            repartition(before, after, tables=["cities", "towns"])
        assert after.specs() == {}
        after.create_table(TableSpec("people", 4))
        with pytest.raises(SpecConflict, match="'people'"):
            repartition(before, after)


def test_a_source_that_moves_on_is_noticed() -> None:
    with filled(MemoryStore(threads=1)) as before, partitioned(2, "token") as after:

        def disturb(table: str, done: int, total: int) -> None:
            if table == "cities":
                commit(before, {"people": update(EXTREMES, 3)})

        with pytest.raises(StoreFailed, match=r"from version 3 to 4.*copy it again"):
            repartition(before, after, progress=disturb)
        repartition(before, after, replace=True)
        assert after.version() == 4
        assert rows_by_id(after, "people") == rows_by_id(before, "people")
