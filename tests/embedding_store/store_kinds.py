"""Kinds of stores by name; each is made empty below a folder, as often as a test likes."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from elastable.embedding_store import Commit, EmbeddingStore, MemoryStore, PartitionedStore
from tests.file_stores import file_store

MakeStore = Callable[[Path], EmbeddingStore]


def memory(_: Path) -> EmbeddingStore:
    return MemoryStore(threads=1)


def in_files(folder: Path) -> EmbeddingStore:
    return file_store(Path(tempfile.mkdtemp(dir=folder)), 1 << 20, threads=1)


def split(strategy: str, *shards: MakeStore) -> MakeStore:
    return lambda folder: PartitionedStore([make(folder) for make in shards], strategy)


KINDS: dict[str, MakeStore] = {
    "memory": memory,
    "memory, indexed": lambda _: MemoryStore(threads=2, direct_bytes=0),
    "files": in_files,
    "token 2": split("token", memory, memory),
    "token 3": split("token", memory, memory, memory),
    "token 3, mixed": split("token", memory, in_files, memory),
    "encoding 1": split("encoding", memory),
    "encoding 2": split("encoding", memory, memory),
    "encoding 4": split("encoding", memory, memory, memory, memory),
    "encoding 2, mixed": split("encoding", in_files, memory),
    "token of encoding": split("token", split("encoding", memory, memory), memory),
    "encoding of token": split("encoding", split("token", memory, memory, memory), split("token", memory, memory)),
    "encoding of encoding": split("encoding", split("encoding", memory, memory), split("encoding", memory, memory)),
}


class FailingShard(MemoryStore):
    """Raises `failure` when a staged commit is finished: before it, or after it as where an answer is lost."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.failure: Exception | None = None
        self.after = False

    def stage(self, commit: Commit) -> Callable[[], None]:
        finish = super().stage(commit)

        def fail() -> None:
            failure, self.failure = self.failure, None
            if failure is None or self.after:
                finish()
            if failure is not None:
                raise failure

        return fail
