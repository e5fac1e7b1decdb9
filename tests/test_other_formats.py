"""What another release wrote in another format is refused by name, layout by layout."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine.tiered import store_state
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.errors import CheckpointError, ElastableError, StoreBroken, StoreFailed
from elastable.embedding_store.log import framing
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.tiers.files.file_tier import MANIFEST_NAME, FileTier
from elastable.master.api import JobSpec
from elastable.master.commits import version_record
from elastable.master.commits.version_record import VersionRecord, job_as_json
from elastable.master.tasks.progress import Progress
from elastable.replicas.host_embeddings import host_embedding as host_file


def state_of_a_store(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store_state, "_FORMAT", 9)
        written = StoreState(1, 0, None, []).to_bytes()
    StoreState.from_bytes(written, "here")


def folder_of_a_tier(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    FileTier(folder).close()
    path = folder / MANIFEST_NAME
    text, _, rest = path.read_bytes()[:-4].partition(b"\n")
    body = json.dumps({**json.loads(text), "format": "elastable-file-tier-9"}).encode() + b"\n" + rest
    path.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    FileTier(folder)


def folder_of_a_log(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(framing, "MAGIC", b"ELSTLOG9")
        with FileLog(folder) as log:
            log.append(1, 1, [b"one"])
    FileLog(folder)


def record_of_a_version(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(version_record, "_FORMAT", 9)
        written = VersionRecord(job_as_json(JobSpec()), Progress(1), {}).to_bytes()
    VersionRecord.from_bytes(written)


def host_embedding(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host_file, "_FORMAT", "elastable host embedding 9")
        host_file._write(folder / "one", "one", {"rows": np.zeros(3, np.float32)})
    host_file._read(folder / "one")


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (state_of_a_store, StoreBroken, "here: the store was written by another release .format 9, not 2"),
        (folder_of_a_tier, StoreFailed, "format 'elastable-file-tier-9'; this version reads 'elastable-file-tier-1'"),
        (folder_of_a_log, StoreBroken, "at byte 0 is of format b'ELSTLOG9'; this version reads b'ELSTLOG1'"),
        (record_of_a_version, CheckpointError, "record has format 9; this version reads 1"),
        (host_embedding, CheckpointError, "its format is 'elastable host embedding 9'"),
    ],
)
def test_another_format(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    read: Callable[[pytest.MonkeyPatch, Path], None],
    error: type[ElastableError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        read(monkeypatch, tmp_path)
