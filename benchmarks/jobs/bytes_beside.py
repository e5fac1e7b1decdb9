"""Writes as many bytes a version as the log of a job, and does nothing else: to tell what these bytes cost.

The program waits for each version of a job and then appends prepared bytes: to a Redis stream in one transaction, of
which only the newest entries are kept, or to files that begin anew at 64 MiB and are synced once a second. It gathers
no rows, and checks and recovers nothing.

    python -m benchmarks.jobs.bytes_beside MASTER BYTES redis HOST:PORT
    python -m benchmarks.jobs.bytes_beside MASTER BYTES files FOLDER
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redis

from elastable.embedding_store.wire.remote_source import RemoteSource

_PART = 512 << 10
_KEPT_PARTS = 200
_SEGMENT = 64 << 20
_WAIT_S = 600.0


def main(arguments: Sequence[str]) -> None:
    """Runs until it is killed."""
    master, size, kind, where = arguments
    prepared = os.urandom(int(size))
    append = _to_redis(where, prepared) if kind == "redis" else _to_files(Path(where), prepared)
    with RemoteSource(master, deadline_s=_WAIT_S) as source:
        version = source.version()
        while True:
            if source.wait_for_version(version + 1, _WAIT_S):
                version = source.version()
                append()


def _to_redis(address: str, prepared: bytes) -> Callable[[], None]:
    host, _, port = address.rpartition(":")
    client = redis.Redis(host, int(port))
    parts = [prepared[start : start + _PART] for start in range(0, len(prepared), _PART)]

    def append() -> None:
        with client.pipeline(transaction=True) as pipeline:
            for part in parts:
                pipeline.xadd("bytes", {b"p": part}, maxlen=_KEPT_PARTS, approximate=True)
            pipeline.execute()

    return append


def _to_files(folder: Path, prepared: bytes) -> Callable[[], None]:
    folder.mkdir()
    fds = [_fresh(folder, 0)]
    written, number = 0, 0

    def sync() -> None:
        while True:
            time.sleep(1.0)
            os.fdatasync(fds[-1])

    threading.Thread(target=sync, daemon=True).start()

    def append() -> None:
        nonlocal written, number
        if written >= _SEGMENT:
            written, number = 0, number + 1
            fds.append(_fresh(folder, number))
            (folder / f"{number - 2}").unlink(missing_ok=True)
        os.pwrite(fds[-1], prepared, written)
        written += len(prepared)

    return append


def _fresh(folder: Path, number: int) -> int:
    fd = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.posix_fallocate(fd, 0, _SEGMENT)
    return fd


if __name__ == "__main__":
    main(sys.argv[1:])
