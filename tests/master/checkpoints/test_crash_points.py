"""A writer that ends after any single write, fsync or rename leaves the newest whole checkpoint to be found."""

import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles, LocalFiles, Part
from elastable.master.checkpoints.storage.checkpoint_locations import RemoteFiles, checkpoint_names, files_at
from tests.master.checkpoints.jobs import DYNAMIC, FIXED, Rows, begun, commit, created, restored, rows, written

pytestmark = pytest.mark.process

VERSIONS = 5
ROOT = Path(__file__).parents[3]


class Crash(BaseException):
    """The process is gone: nobody handles this."""


class Steps:
    """Counts what is done to a file system; after `left` steps `stop` is called, at every further one again."""

    def __init__(self, left: int, stop: Callable[[], None]) -> None:
        self.left, self._stop, self._lock = left, stop, threading.Lock()

    def one(self) -> None:
        with self._lock:
            self.left -= 1
            if self.left < 0:
                self._stop()


def crash() -> None:
    raise Crash


def full() -> None:
    raise OSError(28, "No space left on device")


class SteppedFiles(LocalFiles):
    """A folder whose every write (half of it first), fsync and rename is a step."""

    def __init__(self, home: Path, steps: Steps) -> None:
        super().__init__(home)
        self.steps = steps

    def begin(self, name: str) -> str:
        self.steps.one()
        return super().begin(name)

    def _put(self, number: int, part: Part) -> int:
        self.steps.one()
        done = super()._put(number, part[: (len(part) + 1) // 2])
        self.steps.one()
        return done + (super()._put(number, part[done:]) if part[done:] else 0)

    def _sync(self, number: int) -> None:
        self.steps.one()  # and no more: the processes of these tests end, the machine does not

    def _rename(self, old: str, new: str) -> None:
        self.steps.one()
        super()._rename(old, new)

    def _delete(self, folder: str) -> None:
        """As a crash leaves it: one file of a folder is gone, the others are not."""
        for name in self.names(folder):
            self.steps.one()
            (Path(self.address) / folder / name).unlink()
        self.steps.one()
        super()._delete(folder)


class SteppedSystem(MemoryFileSystem):
    """An object store in memory of which every call that changes it is a step."""

    cachable = False
    steps = Steps(1 << 30, crash)

    def _open(self, path: str, mode: str = "rb", **settings: object) -> object:
        if "w" in mode:
            self.steps.one()
        return super()._open(path, mode, **settings)

    def pipe_file(self, path: str, value: bytes, **settings: object) -> None:
        self.steps.one()
        super().pipe_file(path, value, **settings)
        self.steps.one()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for file in sorted(self.find(path)) if recursive else []:
            self.steps.one()
            super().rm_file(file)
        self.steps.one()
        super().rm(path, recursive=recursive)

    def rm_file(self, path: str) -> None:
        self.steps.one()
        super().rm_file(path)


def run(files: CheckpointFiles, store: EmbeddingStore, acknowledge: Callable[[int, Rows], None]) -> None:
    """Versions with a checkpoint each: a full one, increments, a full one; two are kept."""
    series = CheckpointSeries(files, store, keep=2, full_every=3)
    for version in range(1, VERSIONS + 1):
        many = list(range(40)) if version == 1 else [version, 40 + version]
        series.committed(commit(store, {"fixed": many, "dynamic": many}))
        begun(series, store)()
        acknowledge(version, rows(store))


def expected_rows() -> dict[int, Rows]:
    held: dict[int, Rows] = {}
    with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
        run(RemoteFiles(MemoryFileSystem(), f"/{uuid.uuid4().hex}", "memory"), store, held.__setitem__)
    return held


def look(files: CheckpointFiles, acknowledged: int, expected: dict[int, Rows]) -> None:
    """What a new process finds: a whole checkpoint of the last version that was acknowledged, or a newer one."""
    names = checkpoint_names(files)
    if not names:
        assert not acknowledged
        return
    for name in names:
        found = open_checkpoint(files.at(name))
        found.verify()
        assert restored(found) == expected[found.version]
        assert found.dense()["optimizer/00000"] == found.version
    assert found.version >= acknowledged


def recover(files: CheckpointFiles, expected: dict[int, Rows]) -> None:
    """The next process goes on, and takes away what the one before left."""
    with MemoryStore(threads=1) as store:
        names = checkpoint_names(files)
        if not names:
            return
        newest = open_checkpoint(files.at(names[-1]))
        restore_tables(newest, store)
        written(files, store, keep=1)
        assert len(checkpoint_names(files)) == 1 == len(files.names())
        look(files, newest.version, expected)


def crashed_after(steps: Steps, files: CheckpointFiles) -> int:
    """The last version that was acknowledged before the crash."""
    acknowledged = [0]
    with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
        try:
            run(files, store, lambda version, _: acknowledged.append(version))
        except (Crash, CheckpointError):
            assert steps.left < 0
    return acknowledged[-1]


@pytest.mark.parametrize(("kind", "least"), [("folder", 150), ("object store", 40)])
def test_after_every_change_of_a_folder_or_an_object_store(tmp_path: Path, kind: str, least: int) -> None:
    expected, root, system = expected_rows(), f"/{uuid.uuid4().hex}", SteppedSystem()
    point, acknowledged = 0, 0
    while acknowledged < VERSIONS:
        system.steps = steps = Steps(point, crash)
        home, name = tmp_path / str(point), f"{root}/{point}"
        stepped: CheckpointFiles
        left: CheckpointFiles
        if kind == "folder":
            stepped, left = SteppedFiles(home, steps), LocalFiles(home)
        else:
            stepped, left = RemoteFiles(system, name, f"memory:/{name}"), files_at(f"memory:/{name}")
        acknowledged = crashed_after(steps, stepped)
        look(left, acknowledged, expected)
        if kind != "folder" or point % 5 == 0:
            recover(left, expected)
        point += 1
    assert point > least
    if MemoryFileSystem().exists(root):
        fsspec.filesystem("memory").rm(root, recursive=True)


def test_nothing_is_renamed_before_it_is_on_the_disk(tmp_path: Path) -> None:
    class Watched(LocalFiles):
        """Knows which bytes and which names a loss of power would take."""

        def _put(self, number: int, part: Part) -> int:
            with lock:
                at_risk.add(os.readlink(f"/proc/self/fd/{number}"))
            return super()._put(number, part)

        def _sync(self, number: int) -> None:
            super()._sync(number)
            with lock:
                at_risk.discard(os.readlink(f"/proc/self/fd/{number}"))
                synced.append(os.readlink(f"/proc/self/fd/{number}"))

        def _rename(self, old: str, new: str) -> None:
            if not new.startswith("ckpt-"):
                return super()._rename(old, new)
            assert at_risk == set()
            assert synced[-1] == str(tmp_path / old)
            assert {str(file) for file in (tmp_path / old).iterdir()} <= set(synced)
            super()._rename(old, new)
            renamed.append(new)
            return None

    lock, at_risk, synced, renamed = threading.Lock(), set[str](), list[str](), list[str]()
    with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
        run(Watched(tmp_path), store, lambda version, _: None)
    assert len(renamed) == VERSIONS
    assert synced[-1] == str(tmp_path)  # the new names in it


@pytest.mark.parametrize("point", range(0, 120, 29))
def test_a_full_disk_leaves_what_was_there_and_no_draft(tmp_path: Path, point: int) -> None:
    with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
        commit(store, {"fixed": list(range(9)), "dynamic": [1]})
        written(tmp_path, store)
        before = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()}
        commit(store, {"fixed": list(range(9)), "dynamic": [2]})

        class Full(SteppedFiles):
            def _rename(self, old: str, new: str) -> None:
                LocalFiles._rename(self, old, new)

            def _delete(self, folder: str) -> None:
                LocalFiles._delete(self, folder)

        steps = Steps(point, full)
        failure = None
        try:
            open_checkpoint(written(Full(tmp_path, steps), store, keep=1)).verify()
        except CheckpointError as error:
            failure = str(error)
        after = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()}
        if failure is not None:
            assert re.search(r"ckpt-0000000002 cannot be written: .*No space left on device", failure)
            assert after == before
        else:
            assert after != before
        assert LocalFiles(tmp_path).drafts() == []


CHILD = """
import os, signal, sys
from pathlib import Path
from elastable.embedding_store.engine.memory_store import MemoryStore
from tests.master.checkpoints.jobs import DYNAMIC, FIXED, created
from tests.master.checkpoints.test_crash_points import SteppedFiles, Steps, run

created(MemoryStore(threads=1), [FIXED, DYNAMIC]).close()  # kernels are loaded before there are children
for point in map(int, sys.argv[2:]):
    child = os.fork()
    if child == 0:
        home = Path(sys.argv[1]) / str(point)
        home.mkdir()
        steps = Steps(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
        acknowledged = os.open(home.with_suffix(".acknowledged"), os.O_WRONLY | os.O_CREAT)
        with created(MemoryStore(threads=1), [FIXED, DYNAMIC]) as store:
            run(SteppedFiles(home, steps), store, lambda version, _: os.pwrite(acknowledged, b"%d" % version, 0))
        os._exit(0)
    assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL)
"""


def child(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_killed_at_any_step(tmp_path: Path) -> None:
    points = range(3, 178, 25)
    ended = child(tmp_path, *points)
    assert ended.returncode == 0, ended.stderr
    expected = expected_rows()
    acknowledged = []
    for point in points:
        acknowledged.append(int((tmp_path / f"{point}.acknowledged").read_text() or 0))
        look(LocalFiles(tmp_path / str(point)), acknowledged[-1], expected)
        recover(LocalFiles(tmp_path / str(point)), expected)
    assert len(set(acknowledged)) > 3


def test_what_killed_writers_left_is_taken_away(tmp_path: Path) -> None:
    for left in (".writing-abc", ".removing-def"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "dense.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("a person's")
    with created(MemoryStore(threads=1), [FIXED]) as store:
        written(tmp_path, store)
    assert LocalFiles(tmp_path).names() == ["ckpt-0000000000", "notes.txt"]


def test_a_writer_that_was_taken_for_dead_writes_nothing(tmp_path: Path) -> None:
    class Stopped(LocalFiles):
        """Is stopped before its last rename; another process writes meanwhile."""

        def _rename(self, old: str, new: str) -> None:
            if new == "ckpt-0000000001":
                written(tmp_path, store)
            super()._rename(old, new)

    with created(MemoryStore(threads=1), [FIXED]) as store:
        commit(store, {"fixed": [1]})
        with pytest.raises(CheckpointError, match=r"ckpt-0000000001 cannot be written: .*No such file"):
            written(Stopped(tmp_path), store)
    assert LocalFiles(tmp_path).names() == ["ckpt-0000000001"]
    open_checkpoint(tmp_path).verify()
