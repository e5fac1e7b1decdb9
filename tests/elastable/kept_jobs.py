"""Jobs that keep all their checkpoints: trained, resumed from an older one, and compared."""

import shutil
from pathlib import Path

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.comparing import compare_dense, compare_tables
from elastable.master.checkpoints.restoring import restore_tables
from tests.elastable.processes import run_elastable


def trained(job: str | Path, home: Path, *options: str | Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    """What the job said; its checkpoints are in `home/saved`, its runs in `home/runs`."""
    places = ("--checkpoint-dir", home / "saved", "--keep", "0", "--run-dir", home / "runs")
    ran = run_elastable("train", job, "--no-export", "--deadline", "60", *places, *options, env=env)
    assert ran.code == code, f"{ran.out}\n{ran.err}"
    return ran.out + ran.err


def refusal(job: str | Path, home: Path, *options: str | Path) -> str:
    """What a job that is refused says, in one line."""
    ran = run_elastable("train", job, "--no-export", "--deadline", "60", "--run-dir", home / "runs", *options)
    assert ran.code != 0
    return " ".join((ran.out + ran.err).split())


def killed_at(version: int, whole: Path, home: Path) -> None:
    """Fills `home/saved` with what the job of `whole` had saved by that version."""
    shutil.copytree(whole / "saved", home / "saved")
    for checkpoint in (home / "saved").glob("ckpt-*"):
        if open_checkpoint(checkpoint).version > version:
            shutil.rmtree(checkpoint)


def kept(home: Path, version: int | str = "") -> Checkpoint:
    """The last checkpoint, or the last of a version: that of the job's end comes after that of the schedule."""
    name = f"ckpt-{version:010d}*" if isinstance(version, int) else "ckpt-*"
    return open_checkpoint(sorted((home / "saved").glob(name))[-1])


def store_of(checkpoint: Checkpoint) -> MemoryStore:
    store = MemoryStore()
    restore_tables(checkpoint, store)
    return store


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """All dense values and rows, to the bit."""
    assert compare_dense(one, other) == []
    assert [table.table for table in compare_tables(one, other) if not table.same] == []
