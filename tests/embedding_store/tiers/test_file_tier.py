"""What a file tier leaves on the disk and what it refuses by name: full disks, foreign and broken files, two owners."""

import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.errors import BadInput, StoreBroken, StoreFailed, TableNotFound
from elastable.embedding_store.native.record_checks import record_stride
from elastable.embedding_store.tiers.files.file_tier import FileTier
from tests.embedding_store.tiers.tier_places import everything, records

TABLE = TierTable("t", 264, b"described", first_bytes=100)
IDS = np.arange(5_000) - 2_000
POSITIONS = np.random.default_rng(2).permutation(5_000)
ROWS = np.random.default_rng(1).integers(0, 256, (5_000, 264), np.uint8)
ALL = dict(zip(IDS.tolist(), map(bytes, ROWS), strict=True))
HEADER_BYTES = 4096
STRIDE = record_stride(100, 164)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tier with 5,000 records that was closed after `put_state`."""
    with FileTier(tmp_path / "s", fsync=False) as tier:
        tier.create(TABLE)
        tier.write([records("t", IDS, POSITIONS, ROWS)], {}, 7)
        tier.put_state(b"a state")
    return tmp_path / "s"


def read(tier: FileTier, indices: slice | np.ndarray = slice(None), width: int = 264) -> np.ndarray:
    """Rows as `Tier.read` gives them; they must all be there."""
    wanted = records("t", IDS[indices], POSITIONS[indices], width)
    assert not len(tier.read([wanted])[0])
    return wanted.rows


def change_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def record_at(index: int) -> int:
    """Byte of the record file where the record of `IDS[index]` lies."""
    return HEADER_BYTES + STRIDE * int(POSITIONS[index])


def refused(folder: Path, kind: type[StoreFailed] = StoreFailed) -> str:
    with pytest.raises(kind) as error:
        FileTier(folder)
    return str(error.value)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


FULL = """
import resource, sys
import numpy as np
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.tiers.files.file_tier import FileTier
from tests.embedding_store.tiers.tier_places import everything, records

def some(table, count, value):
    ids = np.arange(count)
    return records(table, ids, ids, np.full((count, {"small": 40, "t": 400}[table]), value, np.uint8))

with FileTier(sys.argv[1], fsync=sys.argv[2] == "fsync") as tier:
    tier.create(TierTable("small", 40))
    tier.create(TierTable("t", 400))
    tier.write([some("small", 9, 1), some("t", 2_000, 1)], {}, 1)
    tier.put_state(b"one")
    before = everything(tier, "small"), everything(tier, "t")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    gone = {"small": (np.arange(3), np.arange(3))}
    for _ in range(2):
        try:
            tier.write([some("small", 20, 2), some("t", 30_000, 2)], gone, 2)
        except StoreFailed as error:
            assert "000002.rows: no room for" in str(error), error
        else:
            raise SystemExit("a full disk went unnoticed")
        assert (everything(tier, "small"), everything(tier, "t"), tier.sequence) == (*before, 1)
    tier.write([some("t", 2_500, 3)], {}, 2)
    assert everything(tier, "t") == dict.fromkeys(range(2_500), bytes([3]) * 400)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tier.write([some("t", 30_000, 4)], gone, 3)
    tier.put_state(b"two")
with FileTier(sys.argv[1]) as tier:
    assert everything(tier, "t") == dict.fromkeys(range(30_000), bytes([4]) * 400)
    assert (sorted(everything(tier, "small")), tier.state()) == ([3, 4, 5, 6, 7, 8], b"two")
print("as it was")
"""


@pytest.mark.process
@pytest.mark.parametrize("fsync", ["fsync", "never"])
def test_a_full_disk_is_met_before_anything_changes(tmp_path: Path, fsync: str) -> None:
    """The limit of a process on the size of its files stands for a disk that is full."""
    done = python(FULL, str(tmp_path / "s"), fsync)
    assert (done.returncode, done.stdout.strip()) == (0, "as it was"), done.stderr


@pytest.mark.process
def test_one_process_at_a_time_has_a_folder(saved: Path) -> None:
    with FileTier(saved):
        code = f"from elastable.embedding_store.tiers.files.file_tier import FileTier; FileTier({str(saved)!r})"
        for output in (python(code).stderr, refused(saved)):
            assert "is open already, in process" in output
    FileTier(saved).close()


KILLED = """
import os, signal, sys
from pathlib import Path
from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.tiers.files.file_tier import FileTier

def work(folder, left):
    def counted(call):
        def run(*arguments, **named):
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)
        return run
    if not left:
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    tier = FileTier(folder)
    tier.create(TierTable("one", 9))
    tier.put_state(b"kept")
    os.fsync, Path.replace, Path.unlink = counted(os.fsync), counted(Path.replace), counted(Path.unlink)
    tier.create(TierTable("two", 9))
    tier.drop("one")

for at in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        work(f"{sys.argv[1]}/{at}", at)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, at
"""


@pytest.mark.process
def test_tables_are_there_or_not_wherever_a_creation_or_a_drop_breaks_off(tmp_path: Path) -> None:
    """Processes are killed before their n-th call of the system that changes names or what is on the disk."""
    done = python(KILLED, str(tmp_path), "7")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["lock", "mark", "tables.new"]
    with FileTier(tmp_path / "0") as tier:  # before there was a manifest
        assert (tier.tables(), tier.sequence, tier.state()) == ({}, 0, None)
    numbers = {"one": "000001", "two": "000002"}
    for at in range(1, 7):
        with FileTier(tmp_path / str(at)) as tier:
            assert tier.state() == b"kept"
            names = sorted(tier.tables())
            assert names in (["one"], ["one", "two"], ["two"])
            found = sorted(path.name for path in (tmp_path / str(at)).iterdir() if path.suffix in (".rows", ".ids"))
            assert found == sorted(f"{numbers[name]}.{part}" for name in names for part in ("rows", "ids"))
            tier.create(TierTable("three", 5))
            tier.write([records("three", [1], [0], np.ones((1, 5), np.uint8))], {}, 1)
            assert everything(tier, "three") == {1: b"\x01" * 5}


@pytest.mark.parametrize("name", ["000001.rows", "000001.ids", "tables", "mark"])
@pytest.mark.parametrize("damage", ["cut", "foreign", "missing", "link"])
def test_files_that_are_not_what_was_saved_are_refused_by_name(saved: Path, name: str, damage: str) -> None:
    path = saved / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 300])
    elif damage == "foreign":
        path.write_bytes(bytes(reversed(content)))
    else:
        path.rename(saved.parent / "elsewhere")
        if damage == "link":
            path.symlink_to(saved.parent / "elsewhere")
    if (name, damage) == ("tables", "missing"):
        assert "is no file tier: it holds 000001.ids, 000001.rows but no tables" in refused(saved)
    else:
        assert f"{path} " in refused(saved, StoreFailed if damage == "link" else StoreBroken)


def test_pipes_and_links_in_place_of_a_manifest_are_neither_waited_for_nor_written_through(tmp_path: Path) -> None:
    piped, linked, others = tmp_path / "piped", tmp_path / "linked", tmp_path / "others"
    piped.mkdir()
    os.mkfifo(piped / "tables")
    messages: list[str] = []
    opening = threading.Thread(target=lambda: messages.append(refused(piped, StoreFailed)), daemon=True)
    opening.start()
    opening.join(60)
    assert messages == [f"{piped / 'tables'} cannot be read: it is no regular file"]
    others.write_bytes(b"another user's")
    linked.mkdir()
    (linked / "tables.new").symlink_to(others)
    assert "cannot be written" in refused(linked, StoreFailed)
    assert others.read_bytes() == b"another user's"


def test_records_lie_in_memory_where_the_tier_says(saved: Path) -> None:
    with FileTier(saved) as tier:
        found = tier.mapped("t")
        assert found is not None
        assert (found.first, found.stride, found.items >= 5_000) == (100, STRIDE, True)
        for index in (0, 77, 4_999):
            at = found.begin + found.stride * int(POSITIONS[index]) + 8  # after its check
            np.testing.assert_array_equal(found.file[at : at + found.first], ROWS[index, : found.first])
        with pytest.raises(TableNotFound, match="no such"):
            tier.mapped("no such")


def test_a_file_that_lost_its_last_record_is_refused(saved: Path) -> None:
    path = saved / "000001.rows"
    os.truncate(path, path.stat().st_size - 1)
    assert f"{path} is cut short" in refused(saved, StoreBroken)


def test_the_files_of_two_tables_are_not_mistaken(saved: Path) -> None:
    with FileTier(saved) as tier:
        tier.create(TierTable("u", 264, first_bytes=100))
        tier.write([records("u", IDS, POSITIONS, ROWS[::-1])], {}, 8)
        tier.put_state(b"")
    one, two = saved / "000001.rows", saved / "000002.rows"
    one.rename(saved / "kept")
    two.rename(one)
    (saved / "kept").rename(two)
    assert f"{one} is another file" in refused(saved, StoreBroken)


@pytest.mark.parametrize("at", [0, 8, 50, 107, 112, 120, 283])
def test_a_changed_byte_of_a_record_is_seen_when_it_is_read(saved: Path, at: int) -> None:
    change_byte(saved / "000001.rows", record_at(77) + at)
    message = rf"000001.rows is corrupt: the record at position {POSITIONS[77]} \(byte {record_at(77)}\)"
    with FileTier(saved) as tier:
        np.testing.assert_array_equal(read(tier, slice(0, 77)), ROWS[:77])
        with pytest.raises(StoreBroken, match=message):
            read(tier)
        with pytest.raises(StoreBroken, match=message):
            everything(tier, "t")
        if at < 112:
            with pytest.raises(StoreBroken, match=message):
                read(tier, width=100)
        else:  # of the first bytes alone nothing is wrong
            np.testing.assert_array_equal(read(tier, width=100), ROWS[:, :100])
        with pytest.raises(StoreBroken, match=message):
            read(tier, width=101)
        tier.write([records("t", IDS[77:78], POSITIONS[77:78], ROWS[77:78])], {}, 8)
        np.testing.assert_array_equal(read(tier), ROWS)


def test_a_changed_owner_is_seen(saved: Path) -> None:
    path = saved / "000001.ids"
    change_byte(path, HEADER_BYTES + 16 * 9)
    with FileTier(saved) as tier, pytest.raises(StoreBroken, match=r"000001.ids is corrupt: .* position 9 "):
        everything(tier, "t", width=0)


def test_a_record_in_anothers_place_is_seen(saved: Path) -> None:
    path = saved / "000001.rows"
    content = bytearray(path.read_bytes())
    one, two = record_at(1), record_at(2)
    content[one : one + STRIDE] = content[two : two + STRIDE]
    path.write_bytes(content)
    with FileTier(saved) as tier, pytest.raises(StoreBroken, match=f"position {POSITIONS[1]} "):
        read(tier)


def test_records_that_a_death_tore_are_mended_by_writing_them_again(saved: Path) -> None:
    with FileTier(saved) as tier:
        tier.write([records("t", IDS[:3], POSITIONS[:3], ROWS[:3])], {}, 8)
    for index in (0, 1):
        change_byte(saved / "000001.rows", record_at(index) + 200)
    for repair in ("none", "half", "whole"):
        with FileTier(saved) as tier:
            found = everything(tier, "t")
            assert found.keys() == ALL.keys()
            assert {row_id for row_id, row in found.items() if row != ALL[row_id]} == {-2000, -1999}
            if repair != "none":
                tier.write([records("t", IDS[:1], POSITIONS[:1], ROWS[:1])], {}, 8)
            if repair == "whole":
                tier.write([], {"t": (IDS[1:2], POSITIONS[1:2])}, 8)
                tier.put_state(b"next")
                continue
            with pytest.raises(StoreBroken, match=r"000001.rows is corrupt: [12] of its records, the first at"):
                tier.put_state(b"next")
            assert tier.state() == b"a state"
            if repair == "half":
                change_byte(saved / "000001.rows", record_at(0) + 200)
    with FileTier(saved) as tier:
        assert everything(tier, "t") == {row_id: row for row_id, row in ALL.items() if row_id != -1999}
        assert tier.state() == b"next"


def test_an_id_that_a_loss_of_power_left_twice_is_there_once(saved: Path) -> None:
    """Its deletion was not on the disk yet, its record at another position was."""
    owners = saved / "000001.ids"
    before = owners.read_bytes()
    with FileTier(saved) as tier:
        tier.write([records("t", IDS[:1], [6_000], ROWS[:1])], {"t": (IDS[:1], POSITIONS[:1])}, 8)
    at = HEADER_BYTES + 16 * int(POSITIONS[0])
    with owners.open("r+b") as file:
        file.seek(at)
        file.write(before[at : at + 16])
    with FileTier(saved) as tier:
        assert everything(tier, "t", width=0).keys() == ALL.keys()
        tier.write([records("t", IDS[:1], [7_000], ROWS[:1])], {"t": (IDS[:1], POSITIONS[:1])}, 9)
        tier.put_state(b"")
    with FileTier(saved) as tier:
        assert everything(tier, "t") == ALL


@pytest.mark.parametrize("slot", [0, 1])
def test_a_mark_that_is_torn_had_not_counted_yet(saved: Path, slot: int) -> None:
    with FileTier(saved) as tier:
        tier.write([], {}, 8)
        assert tier.sequence == 8
    change_byte(saved / "mark", 4096 * slot + 3)
    with FileTier(saved) as tier:
        assert tier.sequence in (7, 8)
        tier.write([], {}, 9)
        tier.write([], {}, 10)
    with FileTier(saved) as tier:
        assert tier.sequence == 10


def test_a_file_that_is_cut_short_while_it_is_open_is_named(saved: Path) -> None:
    path = saved / "000001.rows"
    low, high = np.flatnonzero(POSITIONS < 1_000), np.flatnonzero(POSITIONS > 4_900)
    with FileTier(saved) as tier:
        read(tier)  # the file is mapped from here on
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(StoreBroken, match=r"000001.rows is cut short: \d+ bytes where \d+ were written"):
            read(tier, high)
        with pytest.raises(StoreBroken, match="cut short"):
            tier.tables()
        np.testing.assert_array_equal(read(tier, low), ROWS[low])


def test_a_file_that_is_deleted_while_it_is_open_is_named(saved: Path) -> None:
    with FileTier(saved) as tier:
        (saved / "000001.ids").unlink()
        with pytest.raises(StoreBroken, match=r"000001.ids was deleted"):
            tier.tables()


def change_half(tier: FileTier) -> dict[int, bytes]:
    """Writes every other id, deletes some, and adds one far away; returns what must be there now."""
    now = dict(ALL)
    ids, positions = np.append(IDS[::2], 100_000), np.append(POSITIONS[::2], 20_000)
    rows = np.random.default_rng(3).integers(0, 256, (len(ids), 264), np.uint8)
    tier.write([records("t", ids, positions, rows)], {"t": (IDS[1:50:2], POSITIONS[1:50:2])}, 8)
    now.update(zip(ids.tolist(), map(bytes, rows), strict=True))
    for gone in IDS[1:50:2].tolist():
        del now[gone]
    return now


MAPPED_FILE = "elastable.embedding_store.tiers.files.mapped_file"


@pytest.mark.parametrize("way", ["fsync", "none", "not mapped"])
def test_records_written_in_any_way_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def refuse(*_: object) -> mmap.mmap:
        raise OSError(errno.ENODEV, "No such device")

    if way == "not mapped":
        monkeypatch.setattr(f"{MAPPED_FILE}.mmap", SimpleNamespace(**{**vars(mmap), "mmap": refuse}))
    with FileTier(tmp_path / "s", fsync=way == "fsync") as tier:
        tier.create(TABLE)
        tier.write([records("t", IDS, POSITIONS, ROWS)], {}, 7)
        now = change_half(tier)
        assert everything(tier, "t") == now
        tier.put_state(b"next")
    with FileTier(tmp_path / "s") as tier:
        assert everything(tier, "t") == now


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_disk_that_may_forget_is_not_trusted_again(saved: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def write_and_save() -> None:
        tier.write([records("t", IDS[:3], POSITIONS[:3], ROWS[:3])], {}, 8)
        tier.put_state(b"next")

    with FileTier(saved) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StoreFailed, match="Input/output error"):
                write_and_save()
        if call == "fsync":
            for change in (
                lambda: tier.put_state(b"next"),
                lambda: tier.write([], {}, 9),
                lambda: tier.create(TierTable("u", 4)),
                lambda: tier.drop("t"),
            ):
                with pytest.raises(StoreBroken, match=r"failed before: .*Input/output error; restore a checkpoint"):
                    change()
        else:  # nothing was written
            assert tier.sequence == 7
        np.testing.assert_array_equal(read(tier), ROWS)
        assert tier.state() == b"a state"


def test_what_is_no_record_is_refused_before_anything_is_written(saved: Path) -> None:
    good = records("t", IDS[:2], POSITIONS[:2], np.zeros((2, 264), np.uint8))
    with FileTier(saved) as tier:
        for bad in (records("t", [1, 2], [-1, 1], 264), records("t", [1, 2], [2**40, 1], 264)):
            with pytest.raises(BadInput, match="table 't'"):
                tier.write([good, bad], {"t": (IDS[4:5], POSITIONS[4:5])}, 8)
        with pytest.raises(BadInput, match="have reached sequence 7, got 6"):
            tier.write([good], {}, 6)
        with pytest.raises(BadInput, match="table 't'"):
            tier.read([records("t", [1], [-1], 264)])
        with pytest.raises(BadInput, match="table 'u'"):
            tier.create(TierTable("u", 1 << 30))
        assert (everything(tier, "t"), tier.sequence) == (ALL, 7)


def test_a_position_that_nobody_has_is_no_record(saved: Path) -> None:
    with FileTier(saved) as tier:
        wanted = records("t", [-2000] * 4, [10**6, 2**40, 2**62, 2**63 - 1], 264)
        assert sorted(tier.read([wanted])[0].tolist()) == [0, 1, 2, 3]
        assert (wanted.rows == 77).all()


def test_room_that_nothing_was_written_to_takes_no_disk(tmp_path: Path) -> None:
    with FileTier(tmp_path / "s") as tier:
        tier.create(TierTable("t", 500))
        ids = np.arange(4) * 250_000_000
        tier.write([records("t", ids, ids, np.ones((4, 500), np.uint8))], {}, 1)
        assert everything(tier, "t") == dict.fromkeys(ids.tolist(), b"\x01" * 500)
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "s").iterdir()) < 4 << 20


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    assert "letters is no file tier: it holds dear.txt" in refused(tmp_path / "letters")
    assert "cannot be used" in refused(tmp_path / "letters" / "dear.txt")


def test_a_closed_tier_says_so(saved: Path) -> None:
    tier = FileTier(saved)
    tier.close()
    uses: list[Callable[[], object]] = [tier.tables, tier.state, lambda: tier.write([], {}, 9), lambda: tier.sequence]
    for use in uses:
        with pytest.raises(StoreFailed, match="is closed"):
            use()


HOSTILE: dict[str, tuple[object, ...]] = {
    "record_bytes": (0, 1 << 62, 264.0),
    "first_bytes": (265,),
    "items": (-1, 1 << 63, True),
    "name": (["t"], None),
    "token": ("zz", ""),
    "description": ("*",),
    "number": ("../000001", "{home}/000001", "000001/../000001", "1", 1, ""),  # what it names is there, and right
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in HOSTILE for value in HOSTILE[field]])
def test_a_manifest_that_could_not_have_been_written_is_refused(saved: Path, field: str, value: object) -> None:
    path = saved / "tables"
    text, _, state = path.read_bytes()[:-4].partition(b"\n")
    fields = json.loads(text)
    fields["tables"][0][field] = value.replace("{home}", str(saved.parent)) if isinstance(value, str) else value
    for part in ("rows", "ids"):
        shutil.copy(saved / f"000001.{part}", saved.parent)
    body = json.dumps(fields).encode() + b"\n" + state
    path.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    said = "is no number of a table's files" if field == "number" else f"{path} is not the manifest of a file tier"
    assert said in refused(saved, StoreBroken)
