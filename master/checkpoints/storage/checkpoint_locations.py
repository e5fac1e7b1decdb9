"""Where checkpoints are: folders and URLs, and the names of checkpoints in them."""

from __future__ import annotations

import logging
from pathlib import Path

from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.checkpoints.storage.checkpoint_files import MANIFEST, CheckpointFiles, LocalFiles
from elastable.master.checkpoints.storage.checkpoint_names import version_named
from elastable.master.checkpoints.storage.manifest import Manifest

__all__ = [
    "checkpoint_names",
    "files_at",
    "located",
    "newest_checkpoint",
    "require_writable_checkpoints",
]

_log = logging.getLogger(__name__)


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

    Where several jobs have written, it is the newest of the job that wrote last, and a warning says so.

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
                return files, _of_last_job(files, names)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {error}") from error
    return None


def _of_last_job(files: CheckpointFiles, names: list[str]) -> str:
    """Of the checkpoints of a folder, the oldest version first, the newest one of the job that wrote last."""
    manifests = {name: found for name in names if (found := _readable(files, name)) is not None}
    if names[-1] not in manifests:
        return names[-1]  # whoever opens it says what is wrong with it
    last = max(names, key=lambda name: (manifests[name].written if name in manifests else "", names.index(name)))
    jobs = {name: str(found.job.get("job", "")) for name, found in manifests.items()}
    newest = next(name for name in reversed(names) if jobs.get(name) == jobs[last])
    others = sorted({*jobs.values()} - {jobs[last]})
    if others:
        _log.warning(
            "%s holds checkpoints of several jobs: taken is %s of job %s, which wrote last, and none of %s",
            redacted(files.address),
            newest,
            jobs[last],
            ", ".join(others),
        )
    return newest


def _readable(files: CheckpointFiles, name: str) -> Manifest | None:
    try:
        return Manifest.from_json(files.read(f"{name}/{MANIFEST}").tobytes())
    except (OSError, CheckpointError):
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
