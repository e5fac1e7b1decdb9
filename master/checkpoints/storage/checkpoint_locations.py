"""Where checkpoints are: folders and URLs, and the names of checkpoints in them."""

from __future__ import annotations

from pathlib import Path

from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.checkpoints.storage.checkpoint_files import MANIFEST, CheckpointFiles, LocalFiles
from elastable.master.checkpoints.storage.checkpoint_names import version_named

__all__ = [
    "checkpoint_names",
    "files_at",
    "located",
    "newest_checkpoint",
    "require_writable_checkpoints",
]


def files_at(place: str | Path | CheckpointFiles) -> CheckpointFiles:
    """The folder of checkpoints at a path of this machine, or at a URL that fsspec knows.

    Raises:
        BadInput: a URL of a kind that is unknown here, or whose driver is not installed.
    """
    if isinstance(place, CheckpointFiles):
        return place
    if isinstance(place, str) and "://" in place:
        from elastable.master.checkpoints.storage.remote_files import files_at_url  # fsspec, for those who need it

        return files_at_url(place)
    return LocalFiles(Path(place))


def require_writable_checkpoints(place: str | Path) -> None:
    """Makes sure that checkpoints can be written there.

    Raises:
        BadInput: naming the place and why not.
    """
    try:
        files_at(place).probe()
    except OSError as error:
        raise BadInput(f"checkpoints cannot be written to {redacted(str(place))}: {error}") from error


def checkpoint_names(files: CheckpointFiles) -> list[str]:
    """The checkpoints in a folder by name, the oldest version first; where folders are not renamed into their
    place, only those with a manifest."""
    drafts = set(files.drafts())
    found = [(order, name) for name in files.names() if (order := version_named(name)) and name not in drafts]
    return [name for _, name in sorted(found)]


def newest_checkpoint(place: str | Path) -> str | None:
    """The address of the checkpoint at `place`, or of the newest one in it; None where there is none.

    Raises:
        CheckpointError: the place cannot be read.
        BadInput: see `files_at`.
    """
    found = located(place)
    return None if found is None else found[0].at(found[1])


def located(place: str | Path) -> tuple[CheckpointFiles, str] | None:
    """The folder and the name of the checkpoint that `newest_checkpoint` finds."""
    text = str(place).rstrip("/") or "."
    try:
        for folder in (text, f"{text}/checkpoints"):
            files = files_at(folder)
            if MANIFEST in files.names():
                return _in_its_folder(folder)
            names = checkpoint_names(files)
            if names:
                return files, names[-1]
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {error}") from error
    return None


def _in_its_folder(checkpoint: str) -> tuple[CheckpointFiles, str]:
    if "://" in checkpoint:
        home, _, name = checkpoint.rpartition("/")
        return files_at(home), name
    # The link runs/latest has a name, but a checkpoint's neighbours are those of the folder that it links to.
    path = Path(checkpoint)
    if path.is_symlink() or not path.name or path.name == "..":
        path = path.resolve()
    return LocalFiles(path.parent), path.name
