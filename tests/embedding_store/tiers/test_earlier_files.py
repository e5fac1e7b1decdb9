"""Rows that an earlier release left in files are read as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.tiers.files.earlier_files import EarlierFiles, is_earlier_folder
from tests.embedding_store.earlier_release.earlier_stores import IN_ORDER, VERSION, file_store, rows_of_release

FLOAT32 = ("cities", "words", "decays", "limited")


def test_every_row_is_read_as_it_was(tmp_path: Path) -> None:
    folder, expected = file_store(tmp_path), rows_of_release("file")
    assert is_earlier_folder(folder)
    store = EarlierFiles(folder)
    assert store.version == VERSION
    assert sorted(store.tables) == sorted(IN_ORDER)
    for number, name in enumerate(sorted(store.tables)):
        table = store.tables[name]
        blocks = list(table.rows(7))
        ids, positions, rows = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        order = np.argsort(ids)
        np.testing.assert_array_equal(ids[order], expected[f"{number}_ids"])
        assert len(np.unique(positions)) == len(ids)
        if table.direct:
            np.testing.assert_array_equal(positions, ids)
        if name in FLOAT32 and name != "decays":  # whose rows are seen as every step has left them
            numbers = np.ascontiguousarray(rows[order][:, : 4 * table.spec.dim]).view("<f4")
            np.testing.assert_array_equal(numbers, expected[f"{number}_weights"])
        if name == "limited":
            touches = np.ascontiguousarray(rows[order][:, -16:]).view("<i8")
            np.testing.assert_array_equal(touches, expected[f"{number}_touches"])
        state = table.state()
        assert (state.admission_counts is not None) == (table.saved_steps() is not None) == (name == "decays")
        if state.admission_counts is not None:
            np.testing.assert_array_equal(state.admission_counts, expected[f"{number}_counts"])
            assert state.untouched_decay == expected[f"{number}_decay"]


def test_other_folders_are_not_taken_for_one(tmp_path: Path) -> None:
    assert not is_earlier_folder(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "another"}')
    assert not is_earlier_folder(tmp_path)


def test_a_store_that_was_not_closed_cleanly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreBroken, match=r"was not closed cleanly.*restore a checkpoint"):
        EarlierFiles(file_store(tmp_path, clean=False))


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "at", "said"),
    [
        ("manifest.json", 30, "manifest.json is corrupt"),
        ("000001/ids.int64", 8, "ids.int64 is corrupt"),
        ("000001/weights.rows", 5, "not the file of weights"),
        ("000001/weights.rows", 4096 + 9, r"weights.rows is corrupt: the row at position 0 \(byte 4096\)"),
        ("000001/slots.rows", 4096, r"slots.rows is corrupt: the row at position 0"),
    ],
)
def test_what_is_corrupt_is_named(tmp_path: Path, file: str, at: int, said: str) -> None:
    folder = file_store(tmp_path)
    flipped(folder / file, at)
    with pytest.raises(StoreBroken, match=said):
        list(EarlierFiles(folder).tables["cities"].rows())


def test_what_is_missing_or_cut_short_is_named(tmp_path: Path) -> None:
    folder = file_store(tmp_path)
    (folder / "000001/weights.rows").write_bytes((folder / "000001/weights.rows").read_bytes()[:5000])
    with pytest.raises(StoreBroken, match=r"weights.rows is cut short: it has no record at position"):
        list(EarlierFiles(folder).tables["cities"].rows())
    (folder / "000001/weights.rows").unlink()
    with pytest.raises(StoreFailed, match=r"weights.rows cannot be read"):
        list(EarlierFiles(folder).tables["cities"].rows())
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreFailed, match=r"manifest.json cannot be read"):
        EarlierFiles(folder)
