"""What a file store refuses, by name, and that it is as it was: full disks, foreign and broken files, two owners."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, StoreBroken, StoreFailed
from elastable.embedding_store.tiers.files.file_store import FileStore
from tests.contracts.store_samples import commit, dynamic, rows_by_id, update

pytestmark = pytest.mark.process

MIB = 1 << 20
WIDE = TableSpec("t", 64, 20_000, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A store with 5,000 rows that was closed."""
    with FileStore(tmp_path / "s", MIB, threads=1) as store:
        store.create_table(WIDE)
        commit(store, {"t": update(np.arange(5_000), 64)})
    return tmp_path / "s"


FULL = """
import resource, sys
import numpy as np
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.files.file_store import FileStore
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from tests.contracts.store_samples import commit, rows_by_id, update
from elastable.embedding_store.contract.store import RowBlock

size = None if sys.argv[2] == "dynamic" else 40_000
with FileStore(sys.argv[1], 1 << 20, threads=1) as store:
    store.create_table(TableSpec("small", 4, None))
    store.create_table(TableSpec("t", 64, size, optimizer=OptimizerSpec.of("adagrad")))
    commit(store, {"t": update(np.arange(2_000), 64), "small": update(np.arange(5), 4)})
    before, few = rows_by_id(store, "t"), rows_by_id(store, "small")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    many = np.arange(1_000, 30_000)
    ones = np.ones((len(many), 64), np.float32)
    for change in (
        lambda: commit(store, {"small": update(np.arange(9), 4), "t": update(many, 64)}),
        lambda: store.put("t", [RowBlock(many, ones, ones)]),
    ):
        try:
            change()
        except StoreFailed as error:
            assert "weights.rows: no room for" in str(error) and "bytes" in str(error), error
        else:
            raise SystemExit("a full disk went unnoticed")
        assert (rows_by_id(store, "t"), rows_by_id(store, "small"), store.version()) == (before, few, 1)
    commit(store, {"t": update(np.arange(2_500), 64)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    commit(store, {"t": update(many, 64)})
    after = rows_by_id(store, "t")
with FileStore(sys.argv[1], 1 << 20, threads=1) as store:
    assert (store.version(), rows_by_id(store, "t")) == (3, after)
print("as it was")
"""


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_a_full_disk_is_met_before_anything_changes(tmp_path: Path, kind: str) -> None:
    """The limit of a process on the size of its files stands for a disk that is full."""
    done = _python(FULL, str(tmp_path / "s"), kind)
    assert (done.returncode, done.stdout.strip()) == (0, "as it was"), done.stderr


def test_one_store_at_a_time_has_a_folder(saved: Path) -> None:
    with FileStore(saved, MIB):
        code = f"from elastable.embedding_store.tiers.files.file_store import FileStore; FileStore({str(saved)!r})"
        for refused in (_python(code).stderr, _refused(saved)):
            assert "is open already, in process" in refused
    FileStore(saved, MIB).close()


def test_a_process_that_dies_leaves_an_unclean_store(saved: Path) -> None:
    code = f"""
import numpy as np, os
from elastable.embedding_store.tiers.files.file_store import FileStore
from tests.contracts.store_samples import commit, update
store = FileStore({str(saved)!r})
commit(store, {{"t": update(np.arange(9), 64)}})
os._exit(9)
"""
    assert _python(code).returncode == 9
    assert "was not closed cleanly" in _refused(saved)
    assert "was not closed cleanly" in _refused(saved)


def test_a_process_that_dies_while_it_writes_its_first_manifest_leaves_an_empty_store(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from elastable.embedding_store.tiers.files.file_store import FileStore
from elastable.embedding_store.contract.spec import TableSpec
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
FileStore({str(tmp_path / "s")!r}).create_table(TableSpec("t", 4, 9))
"""
    assert _python(code).returncode == -9
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["lock", "manifest.json.new"]
    with FileStore(tmp_path / "s", MIB, unclean="drop") as store:
        assert store.create_table(WIDE)


def test_a_folder_whose_lock_cannot_be_written_is_named(tmp_path: Path) -> None:
    code = f"""
import resource
from elastable.embedding_store.tiers.files.file_store import FileStore
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
FileStore({str(tmp_path / "s")!r})
"""
    assert f"StoreFailed: {tmp_path / 's' / 'lock'} cannot be written: File too large" in _python(code).stderr


@pytest.mark.parametrize("name", ["weights.rows", "slots.rows", "ids.int64", "../manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "foreign", "missing"])
def test_files_that_are_not_what_was_saved_are_refused_by_name(saved: Path, name: str, damage: str) -> None:
    path = (saved / "000001" / name).resolve()
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 3])
    elif damage == "foreign":
        path.write_bytes(bytes(reversed(content)))
    else:
        path.unlink()
    assert path.name in _refused(saved)


def test_the_files_of_two_tables_are_not_mistaken(saved: Path, tmp_path: Path) -> None:
    weights, slots = saved / "000001" / "weights.rows", saved / "000001" / "slots.rows"
    weights.rename(tmp_path / "kept")
    slots.rename(weights)
    (tmp_path / "kept").rename(slots)
    assert "is another file" in _refused(saved)


def test_a_changed_byte_of_a_row_is_seen_when_it_is_read(saved: Path) -> None:
    path = saved / "000001" / "weights.rows"
    content = bytearray(path.read_bytes())
    content[4096 + 264 * 77 + 100] ^= 1
    path.write_bytes(content)
    with FileStore(saved, MIB) as store:
        store.lookup({"t": np.arange(77)})
        with pytest.raises(StoreFailed, match=r"weights.rows is corrupt: the row at position 77 "):
            store.lookup({"t": np.arange(70, 80)})
        with pytest.raises(StoreFailed, match="corrupt"):
            rows_by_id(store, "t")
        store.lookup({"t": np.arange(78, 5_000)})


def test_a_file_that_is_cut_short_while_it_is_open_is_named(saved: Path) -> None:
    path = saved / "000001" / "weights.rows"
    with FileStore(saved, MIB) as store:
        whole = store.read_rows("t", np.arange(5_000))  # the file is mapped from here on
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(StoreFailed, match=r"weights.rows is cut short: \d+ of 264 bytes at byte \d+"):
            store.read_rows("t", np.arange(4_990, 5_000))
        np.testing.assert_array_equal(store.read_rows("t", np.arange(100)).weights, whole.weights[:100])


def test_a_file_on_a_filesystem_that_maps_nothing_is_read_all_the_same(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(saved, MIB) as store:
        mapped = rows_by_id(store, "t")

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    maps_nothing = SimpleNamespace(mmap=refuse, MAP_SHARED=mmap.MAP_SHARED, PROT_READ=mmap.PROT_READ)
    monkeypatch.setattr("elastable.embedding_store.tiers.files.row_file.mmap", maps_nothing)
    with FileStore(saved, MIB) as store:
        read = rows_by_id(store, "t")
    assert mapped.keys() == read.keys()
    for row, other in zip(mapped.values(), read.values(), strict=True):
        np.testing.assert_array_equal(row, other)


def test_a_store_that_fails_in_the_middle_of_a_change_says_so_from_then_on(saved: Path) -> None:
    path = saved / "000001" / "slots.rows"
    content = bytearray(path.read_bytes())
    content[4096 + 264 * 77 + 100] ^= 1
    path.write_bytes(content)
    store = FileStore(saved, MIB)
    with pytest.raises(StoreFailed, match=r"slots.rows is corrupt"):
        commit(store, {"t": update(np.arange(100), 64)})
    for again in (lambda: store.lookup({"t": np.arange(3)}), lambda: commit(store, {}), store.flush):
        with pytest.raises(StoreBroken, match=r"failed in the middle of a change; restore a checkpoint: .*slots.rows"):
            again()
    store.close()
    assert "was not closed cleanly" in _refused(saved)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    assert "letters is no file store: it holds dear.txt" in _refused(tmp_path / "letters")
    assert "cannot be used" in _refused(tmp_path / "letters" / "dear.txt")
    with pytest.raises(BadInput, match="at least 1 MiB"):
        FileStore(tmp_path / "small", 1000)
    with pytest.raises(BadInput, match='"refuse" or "drop"'):
        FileStore(tmp_path / "small", unclean="keep")


def test_admission_and_eviction_go_on_where_they_were(tmp_path: Path) -> None:
    spec = TableSpec("t", 4, None, admission=AdmissionSpec(2, 1024), eviction=EvictionSpec(max_age=2))
    with FileStore(tmp_path / "s", MIB) as store:
        store.create_table(spec)
        commit(store, {"t": update(np.array([1, 2, 3]), 4)})
        commit(store, {"t": update(np.array([1, 2]), 4)})
        assert store.row_count("t") == 2
    with FileStore(tmp_path / "s", MIB) as store:
        commit(store, {"t": update(np.array([3, 1]), 4)})
        assert sorted(rows_by_id(store, "t")) == [1, 2, 3]
        commit(store, {})
    with FileStore(tmp_path / "s", MIB) as store:
        commit(store, {})
        assert sorted(rows_by_id(store, "t")) == [1, 3]


def test_a_closed_store_says_so(saved: Path) -> None:
    store = FileStore(saved)
    store.close()
    store.close()
    with pytest.raises(StoreFailed, match="is closed"):
        store.lookup({"t": np.arange(2)})


def test_what_does_not_fit_is_refused_before_the_store_is_unclean(saved: Path) -> None:
    with FileStore(saved) as store:
        with pytest.raises(BadInput):
            store.put("t", [RowBlock(np.arange(2), np.ones((2, 3), np.float32), np.ones((2, 64), np.float32))])
        with pytest.raises(BadInput):
            store.create_table(dynamic("t"))
        assert '"clean": true' in (saved / "manifest.json").read_text()


def _refused(folder: Path) -> str:
    with pytest.raises(StoreFailed) as refused:
        FileStore(folder, MIB)
    return str(refused.value)


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
