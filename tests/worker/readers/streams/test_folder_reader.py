"""Files that appear: in the order of their paths, late ones when they come, bad records passed over."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import fsspec.implementations.local
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import elastable as et
from elastable.embedding_store.errors import BadInput
from elastable.master.api import Span
from elastable.worker.readers.batch.reader import ModelInputs
from elastable.worker.readers.streams.event_reader import EventReader
from tests.contracts.streams import read


def write(folder: Path, hour: int, users: list[int]) -> str:
    table = pa.table({"user": users, "clicked": [user % 2 for user in users]})
    pq.write_table(table, folder / ".draft")
    return str((folder / ".draft").rename(folder / f"hour={hour:02}.parquet"))


def listed(reader: EventReader, positions: dict[str, str], most: int = 9) -> list[tuple[str, int, bool]]:
    found = reader.ahead(positions, most, None).items()
    return [(Path(name).name, len(each.stops), each.more) for name, each in found]


def test_files_come_in_order_and_a_late_one_is_not_lost(tmp_path: Path) -> None:
    reader = et.FolderReader(tmp_path, label="clicked")
    assert reader.ahead({}, 3, None) == {}
    with pytest.raises(BadInput, match="no event is there yet"):
        reader.take(np.array([0]))
    two, four = write(tmp_path, 2, [1, 2, 3]), write(tmp_path, 4, [4, 5])
    assert listed(reader, {}, 2) == [("hour=02.parquet", 2, True)]
    assert listed(reader, {}, 3) == [("hour=02.parquet", 3, True)]
    assert listed(reader, {two: "1"}, 3) == [("hour=02.parquet", 2, False), ("hour=04.parquet", 2, False)]
    assert sum(each.lag for each in reader.ahead({}, 1, None).values()) == 5
    ends = reader.ends()
    three = write(tmp_path, 3, [7])
    assert listed(reader, {two: "3", four: "1"}) == [("hour=03.parquet", 1, False), ("hour=04.parquet", 1, False)]
    assert ends == {two: "3", four: "2"}
    assert list(reader.ahead({two: "3"}, 9, ends)) == [four]
    os.utime(three, (1_000, 1_000))
    assert (reader.ends(2_000.0), reader.ends(time.time() + 60).keys()) == ({three: "1"}, {two, three, four})
    batch, bad = read(reader, Span(two, "1", "3", 2), Span(four, "0", "1", 1))
    assert (batch[0]["user"].tolist(), batch[1].tolist(), bad) == ([2, 3, 4], [0, 1, 0], ())


def test_a_file_system_that_says_no_times_has_no_end_at_one(tmp_path: Path) -> None:
    class Timeless(fsspec.implementations.local.LocalFileSystem):
        def info(self, path: str, **_: object) -> dict[str, object]:
            found: dict[str, object] = super().info(path)
            return {name: found[name] for name in ("name", "size", "type")}

    write(tmp_path, 1, [1, 2])
    reader = et.FolderReader(tmp_path, label="clicked", filesystem=Timeless())
    assert list(reader.ends().values()) == ["2"]
    with pytest.raises(BadInput, match=r"does not say when .*hour=01.parquet' was written: end at positions"):
        reader.ends(time.time())


def test_a_file_that_is_gone_or_changed_before_it_was_trained_is_missed(tmp_path: Path) -> None:
    one, two = write(tmp_path, 1, [1, 2, 3, 4]), write(tmp_path, 2, [5])
    reader = et.FolderReader(tmp_path, label="clicked")
    ends, found = reader.ends(), reader.ahead({}, 2, None)[one]
    assert (found.start, found.stops) == ("0/4", ["1/4", "2/4"])
    for until in ({"hour=01.parquet": "3"}, {one: "4", str(tmp_path / "hour=03.parquet"): "1"}):
        with pytest.raises(BadInput, match=r"there is no file .*hour=0.*whole paths: the first file is .*hour=01"):
            reader.ahead({}, 2, until)
    with pytest.raises(BadInput, match=r"hour=01\.parquet' has 4 records: no job on it can end at record 5"):
        reader.ahead({}, 2, {one: "5"})
    Path(one).unlink()
    assert listed(reader, {one: "4/4"}) == [("hour=02.parquet", 1, False)]
    assert list(reader.ahead({one: "4/4"}, 9, ends)) == [two]
    bounds: list[Mapping[str, str] | None] = [None, ends]
    for bound in bounds:
        with pytest.raises(BadInput, match=r"no file .*hour=01\.parquet', of which the records from 2 to 4 are not"):
            reader.ahead({one: "2/4"}, 9, bound)
    write(tmp_path, 1, [1, 2, 3])
    assert len(reader.ahead({}, 9, None)[one].stops) == 3
    with pytest.raises(BadInput, match=r"hour=01\.parquet' has 3 records, and had 4 when 2 of them were planned"):
        reader.ahead({one: "2/4"}, 9, None)


def test_a_record_that_cannot_be_read_is_refused_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,clicked\n1,0\n3,1\n")
    (tmp_path / "b.csv").write_text("user,clicked\n4,1\nx,1\n")
    reader = et.FolderReader(tmp_path, "*.csv", label="clicked").for_inputs(ModelInputs({"user": "int64"}))
    first, other = (str(tmp_path / name) for name in ("a.csv", "b.csv"))
    batch, _ = read(reader, Span(first, "0", "2", 2))
    assert batch[0]["user"].tolist() == [1, 3]
    with pytest.raises(BadInput, match=r"b\.csv, line 3: column 'user'"):
        reader.read([Span(first, "1", "2", 1), Span(other, "0", "1", 1)])


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"pattern='a\.parquet': write a glob"):
        et.FolderReader(tmp_path, "a.parquet")
    name = write(tmp_path, 1, [1])
    with pytest.raises(BadInput, match="position 'x': write a number of records"):
        et.FolderReader(tmp_path).ahead({name: "x"}, 1, None)
    (tmp_path / "hour=02.parquet").write_bytes(b"half of it")
    with pytest.raises(BadInput, match="not a Parquet file that can be read"):
        et.FolderReader(tmp_path).ahead({}, 1, None)
