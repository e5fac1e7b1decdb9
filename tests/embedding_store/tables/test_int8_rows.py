"""int8 tables: what is read lies within half a scale of what was written, and stays there."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from elastable.embedding_store import MemoryStore, RowBlock, convert_table
from elastable.embedding_store.contract.spec import AdmissionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, SpecConflict, TableNotFound
from elastable.embedding_store.native.slab import anonymous_slab
from elastable.embedding_store.tables.row_dtypes import row_values
from tests.contracts.store_samples import commit, rows_by_id, update

DIM = 5
LARGEST = np.finfo(np.float32).max
SERVED = TableSpec("t", DIM, None, "int8", InitializerSpec("normal", 0, 0.1), optimizer=OptimizerSpec.of("sgd"))


def written(rows: np.ndarray) -> np.ndarray:
    """What rows float32 `[n, dim]` read once they are written."""
    values = row_values(TableSpec("t", rows.shape[1], dtype="int8"), len(rows), anonymous_slab)
    values.write(np.arange(len(rows)), rows)
    out = np.empty_like(rows)
    values.read(np.arange(len(rows)), out)
    return out


@settings(max_examples=200)
@example(np.array([[0, -0.0, 0, 0], [LARGEST, -LARGEST, 1, 0], [1e-45, 0, 0, 0]], np.float32))
@given(arrays(np.float32, (3, 4), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_no_value_is_off_by_more_than_half_a_scale_and_writing_again_changes_nothing(rows: np.ndarray) -> None:
    read = written(rows)
    error = np.abs(read.astype(np.float64) - rows)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True).astype(np.float64) / 127, 2.0**-110)
    assert (error <= scales / 2 * (1 + 2.0**-22)).all()
    assert np.isfinite(read).all()
    assert (read[~rows.any(axis=1)] == 0).all()
    assert written(read).tobytes() == read.tobytes()


def trained(dtype: str = "float32", **other: object) -> MemoryStore:
    adam = OptimizerSpec.of("adam", learning_rate=0.1)
    store = MemoryStore(threads=1)
    store.create_table(TableSpec("t", DIM, None, dtype, SERVED.initializer, optimizer=adam, **other))  # type: ignore[arg-type]
    for seed in range(3):
        commit(store, {"t": update(np.arange(-250, 250), DIM, seed)})
    return store


def test_a_trained_table_is_served_in_int8() -> None:
    ids = np.arange(-260, 260)
    with trained(admission=AdmissionSpec(1)) as source, MemoryStore(threads=1) as target:
        assert convert_table(source, "t", target, "int8", block_rows=64) == target.row_count("t") == 500
        spec = target.specs()["t"]
        assert (spec.dtype, spec.optimizer, spec.admission) == ("int8", OptimizerSpec(), None)
        before, after = source.lookup({"t": ids})["t"], target.lookup({"t": ids})["t"]
        np.testing.assert_array_equal(before[:10], after[:10])  # never trained, so never quantised
        error = np.abs(before.astype(np.float64) - after)
        assert 0 < error.max() <= np.abs(before[10:-10]).max() / np.float32(127) / 2
        kept = rows_by_id(target, "t")
        target.put("t", list(target.scan("t")))
        assert rows_by_id(target, "t") == kept


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_other_dtypes_take_their_slots_along_and_train_on(dtype: str) -> None:
    with trained() as source, MemoryStore(threads=1) as target, MemoryStore(threads=1) as back:
        convert_table(source, "t", target, dtype)
        assert target.specs()["t"].optimizer == source.specs()["t"].optimizer
        rounded, exact = (store.lookup({"t": np.arange(-250, 250)})["t"] for store in (target, source))
        assert (rounded != exact).any() == (dtype != "float32")
        slots = [{one: slots for one, (_, slots) in rows_by_id(store, "t").items()} for store in (source, target)]
        assert slots[0] == slots[1]
        target.reset_version(source.version())
        commit(target, {"t": update(np.arange(9), DIM)})
        convert_table(target, "t", back, "float32")
        assert rows_by_id(back, "t") == rows_by_id(target, "t")


def test_a_conversion_takes_along_what_was_sighted() -> None:
    with MemoryStore(threads=1) as source, MemoryStore(threads=1) as target:
        source.create_table(TableSpec("t", DIM, admission=AdmissionSpec(2)))
        commit(source, {"t": update(np.arange(4), DIM)})
        assert convert_table(source, "t", target, "bfloat16") == 0
        target.reset_version(1)
        commit(target, {"t": update(np.arange(2, 6), DIM)})
        assert sorted(rows_by_id(target, "t")) == [2, 3]


def test_a_conversion_that_cannot_be_leaves_nothing_behind() -> None:
    with trained() as source, MemoryStore(threads=1) as target:
        with pytest.raises(TableNotFound, match="'u'; tables there: t"):
            convert_table(source, "u", target, "int8")
        source.put("t", [RowBlock(np.array([1]), np.full((1, DIM), 1e6, np.float32), np.zeros((1, 10), np.float32))])
        with pytest.raises(BadInput, match="float16"):
            convert_table(source, "t", target, "float16")
        assert target.specs() == {}
        convert_table(source, "t", target, "int8")
        with pytest.raises(SpecConflict, match="has a table 't' already"):
            convert_table(source, "t", target, "int8")
