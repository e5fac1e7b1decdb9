import numpy as np
import pytest

from elastable.embedding_store import EmbeddingTable, MemoryStore, OptimizerSpec, RowBlock, TableSpec
from elastable.embedding_store.errors import BadIds, BadInput, NotFinite
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.checks import as_ids, require_block, require_finite, require_ids

FIXED = TableSpec("cities", 3, 10)
DYNAMIC = TableSpec("people", 3)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_integers_become_ids(dtype: type) -> None:
    ids = as_ids(np.array([[1, 2], [3, 100]], dtype))
    assert (ids.dtype, ids.tolist()) == (np.int64, [[1, 2], [3, 100]])


def test_lists_become_ids() -> None:
    assert as_ids([3, -4]).tolist() == [3, -4]
    assert as_ids([]).dtype == np.int64


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 11), (np.float32, 24), (np.float64, 53), (np.longdouble, 62)])
def test_floats_that_are_integers_become_ids(dtype: type, bits: int) -> None:
    largest = 2**bits - 1 if bits < 53 else 2**53 - 1
    assert as_ids(np.array([[1, 0], [-largest, largest]], dtype)).tolist() == [[1, 0], [-largest, largest]]
    assert as_ids(np.zeros((0, 2), dtype)).shape == (0, 2)


def test_int64_ids_are_not_copied() -> None:
    ids = np.arange(3)
    assert as_ids(ids) is ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1.0, 2.5]), r"table 'cities': id 2.5 is no integer \(position 1\)"),
        (np.array([1.0, np.nan]), r"id nan is no integer: fill or drop it.*null.*\(position 1\)"),
        ([1.0, np.inf], "id inf is no integer"),
        (
            np.array([2**24], np.float32),
            r"id 16777216 may have been rounded: float32 .* below 2\*\*24; give ids as int64",
        ),
        (np.array([2.0**53]), r"id 9007199254740992 may have been rounded: float64 .* below 2\*\*53"),
        (np.array([2048], np.float16), r"id 2048 may have been rounded: float16 .* below 2\*\*11"),
        ([1, None], "got None, a NoneType, at position 1"),
        ([2**64], "got 18446744073709551616, a int, at position 0"),
        (np.ma.masked_array([1, 2], [False, True]), "ids: the value at position 1 is masked"),
        (np.array([True]), "bool"),
        (np.array(["a"]), "<U1"),
        (np.array([3, 2**63], np.uint64), "id 9223372036854775808 at position 1"),
    ],
)
def test_what_is_no_id(values: np.ndarray, message: str) -> None:
    with pytest.raises(BadIds, match=message):
        as_ids(values, "cities")


def test_strided_ids_come_back_contiguous() -> None:
    assert require_ids(FIXED, np.arange(10)[::3]).flags.c_contiguous


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (4, 1), (6, 2)])
def test_values_that_are_not_finite(value: float, row: int, column: int) -> None:
    ids, gradients = np.arange(7) + 100, np.full((7, 3), 3e38, np.float32)
    require_finite(DYNAMIC, ids, gradients)
    gradients[row, column] = value
    with pytest.raises(NotFinite, match=rf"'people'.*id {row + 100} \(position {row}\) is {value} in column {column}"):
        require_finite(DYNAMIC, ids, gradients)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize(
    "name", ["adagrad", "rowwise_adagrad", "ftrl", "adam", "adamax", "nadam", "rmsprop", "adadelta"]
)
def test_slots_that_no_step_can_leave(name: str, value: float) -> None:
    optimizer, begin, refused = row_optimizer(OptimizerSpec.of(name)), 0, 0
    for slot in optimizer.slots:
        slots = np.ones((2, optimizer.slot_width(3)), np.float32)
        slots[1, begin] = value
        block = RowBlock(np.arange(2), np.ones((2, 3), np.float32), slots)
        if value != -1 or slot.squares:
            message = f"slot '{slot.name}' of id 1 \\(position 1\\) is {value} in column 0"
            with pytest.raises(BadInput if value == -1 else NotFinite, match=message):
                require_block(FIXED, optimizer, block)
            refused += 1
        else:
            require_block(FIXED, optimizer, block)
        begin += slot.columns or 3
    assert refused


def test_what_a_program_puts_is_finite_wherever_it_comes_from() -> None:
    with MemoryStore(threads=1) as store:
        store.create_table(TableSpec("t", 2))
        block = RowBlock(np.array([4]), np.full((1, 2), np.inf, np.float32), np.empty((1, 0), np.float32), trained=True)
        store.put("t", [block])
        with pytest.raises(NotFinite, match="'t'"):
            EmbeddingTable(store, "t").put(store.scan("t"))
