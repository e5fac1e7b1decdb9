"""Files of tensors on their way into a draft: hashed as they are written, a few at once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from elastable.master.api import Tensor
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles
from elastable.master.checkpoints.storage.file_threads import BoundedPool
from elastable.master.checkpoints.storage.manifest import FileEntry
from elastable.master.checkpoints.storage.tensor_file import parts_of
from elastable.master.checkpoints.storage.throttle import Throttle

__all__ = ["FileWriter"]


class FileWriter(BoundedPool[tuple[str, FileEntry]]):
    """Writes files of a draft. Used as a context, which waits for all of them.

    Args:
        files: Where the draft is.
        draft: Its folder.
        note: Goes into every file.
        background: Whether training continues meanwhile.
    """

    def __init__(self, files: CheckpointFiles, draft: str, note: Mapping[str, str], background: bool = False) -> None:
        super().__init__(background)
        self._files = files
        self._draft = draft
        self.note = note
        self._throttle = Throttle() if background else None

    def put(self, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Submits a file: `tensors` as for `parts_of`; they must not change afterwards.

        Raises:
            OSError: of a file submitted earlier.
        """
        self.do(partial(self._write, name, tensors))

    def entries(self) -> dict[str, FileEntry]:
        """Every file by name, once all are written. Raises `OSError`."""
        return dict(self.wait())

    def _write(self, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> tuple[str, FileEntry]:
        parts = parts_of(tensors, self.note)
        digest = hashlib.sha256()
        for part in parts:
            with self._working():
                digest.update(part)
        with self._working():
            self._files.write(f"{self._draft}/{name}", parts)
        return name, FileEntry(digest.hexdigest(), sum(len(part) for part in parts))

    def _working(self) -> AbstractContextManager[None]:
        return nullcontext() if self._throttle is None else self._throttle.working()
