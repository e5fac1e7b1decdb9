"""Changes of a store are read from a log as they were written, and nothing else is read as one."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from elastable.embedding_store import EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.log import changes

SPEC = TableSpec("rows", 3, seed=7, optimizer=OptimizerSpec("adagrad"), eviction=EvictionSpec(max_rows=9))
IDS = st.integers(0, 5).flatmap(lambda n: arrays(np.int64, n))
NAMES = st.text(max_size=8)


@st.composite
def images(draw: st.DrawFn) -> changes.TableImages:
    rows, dim, slots = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    touches = draw(st.none() | arrays(np.int64, (rows, 2)))
    return changes.TableImages(
        draw(NAMES),
        draw(arrays(np.int64, rows)),
        draw(arrays(np.float32, (rows, dim))),
        draw(arrays(np.float32, (rows, slots))),
        touches,
        draw(IDS),
        draw(IDS),
        draw(st.integers(0, 1 << 62)),
    )


COMMITS = st.builds(
    changes.CommitImages,
    st.integers(0, 1 << 62),
    st.lists(images(), max_size=3).map(tuple),
    st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3),
    st.lists(NAMES, max_size=2).map(tuple),
    st.booleans(),
    st.none() | st.binary(max_size=40),
    st.none() | st.floats(0, 2**40),
)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, part.name), getattr(other, part.name)) for part in fields(one)
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def joined(change: changes.Change) -> memoryview:
    return memoryview(b"".join(changes.encode_change(change)))


@settings(max_examples=200, deadline=None)
@given(COMMITS)
def test_a_commit_is_read_as_it_was_written(commit: changes.CommitImages) -> None:
    assert same(changes.decode_change(joined(commit)), commit)


ONES, TOUCHES = np.ones((2, 3), np.float32), np.ones((1, 2), np.int64)
OTHERS: list[changes.Change] = [
    changes.CreateTable(SPEC),
    changes.DropTable("rows"),
    changes.ClearTable("ü\n"),
    changes.PutRows("rows", RowBlock(np.arange(2), ONES, ONES[:, :0], trained=True)),
    changes.PutRows("rows", RowBlock(np.arange(1), ONES[:1], ONES[1:] * 0, TOUCHES, True)),
    changes.DeleteRows("rows", np.array([-1, 1 << 62])),
    changes.PutTableState("rows", TableState(np.arange(13, dtype=np.uint8), -0.25)),
    changes.PutTableState("rows", TableState()),
    changes.PutTableState("rows", TableState(None, -0.25, np.array([[3, 1000, 2000]]))),
    changes.PutTableState("rows", TableState(np.arange(13, dtype=np.uint8), None, np.zeros((0, 3), np.int64))),
    changes.ResetVersion(),
    changes.ResetVersion(b"progress"),
]  # fmt: skip


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: type(change).__name__)
def test_other_changes_are_read_as_they_were_written(change: changes.Change) -> None:
    assert same(changes.decode_change(joined(change)), change)


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: type(change).__name__)
def test_a_change_that_was_cut_or_lengthened_is_refused(change: changes.Change) -> None:
    whole = joined(change)
    for length in range(len(whole)):
        with pytest.raises(StoreBroken, match=f"a log entry of {length} bytes"):
            changes.decode_change(whole[:length])
    with pytest.raises(StoreBroken, match="8 bytes are left over"):
        changes.decode_change(memoryview(bytes(whole) + bytes(8)))


COMMIT: dict[str, object] = {"kind": "commit", "step": 1, "tables": [], "rates": {}, "frozen": []}
COMMIT |= {"ends_replay_epoch": False, "record": False}
IDS_TWO_DEEP = np.zeros((2, 2), np.int64)


@pytest.mark.parametrize(
    ("fields_of", "arrays_of"),
    [
        ({"kind": "drop"}, []),
        ({"kind": "drop", "table": 3}, []),
        ({"kind": "grow", "table": "rows"}, []),
        ({"kind": "drop", "table": "rows"}, [np.arange(3)]),
        ({"kind": "delete", "table": "rows"}, []),
        ({"kind": "delete", "table": "rows"}, [IDS_TWO_DEEP]),
        ({"kind": "delete", "table": "rows"}, [np.zeros(3, np.float32)]),
        ({"kind": "state", "table": "rows"}, [np.arange(3)]),
        ({"kind": "create", "spec": "{}"}, []),
        ({"kind": "create", "spec": None}, []),
        ({"kind": "commit"}, []),
        (COMMIT | {"step": "1"}, []),
        (COMMIT | {"tables": [["rows", False]]}, [np.arange(3)]),
        (COMMIT | {"tables": [["rows", False, -1]]}, [np.arange(2), ONES, ONES, np.arange(0), np.arange(0)]),
    ],
)
def test_what_is_no_change_is_refused(fields_of: dict[str, object], arrays_of: list[np.ndarray]) -> None:
    with pytest.raises(StoreBroken, match="is no change of a store"):
        changes.decode_change(memoryview(b"".join(changes.encode_payload(fields_of, arrays_of))))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(StoreBroken):
        changes.decode_change(memoryview(content))
