"""Checkpoints of knowledge-graph models: one safetensors file and a manifest with checksums, committed by rename."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.malformed import UNREADABLE
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.master.checkpoints.storage.checkpoint_files import MANIFEST, LocalFiles
from elastable.master.checkpoints.storage.tensor_file import parts_of, tensors_in
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings

FORMAT = 1
_KIND = "knowledge graph"
_TENSORS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run.

    Attributes:
        epochs: Epochs completed.
        step: Steps completed.
        best_mrr: Best validation MRR so far; -1 before any.
        best_step: Step of its checkpoint.
        waited: Evaluations since then.
        stopped: Whether early stopping has ended training.
        steps_per_epoch: Steps of an epoch, which depend on the number of workers; 0: before the first step.
        seconds: Time spent so far.
    """

    epochs: int = 0
    step: int = 0
    best_mrr: float = -1.0
    best_step: int = 0
    waited: int = 0
    stopped: bool = False
    evaluated_step: int = 0
    steps_per_epoch: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raises TypeError for a manifest with anything but whole numbers."""
        for name in ("epochs", "step", "best_step", "waited", "evaluated_step", "steps_per_epoch"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} is {getattr(self, name)!r}, not a whole number")


@dataclass(frozen=True, slots=True)
class GraphCheckpoint:
    """A checkpoint that was read: the model's state by global id, and the run that it belongs to."""

    state: Mapping[str, Array]
    settings: TrainSettings
    place: RunProgress
    graph: Mapping[str, object]
    address: str = ""


class GraphCheckpoints:
    """The checkpoints of one run, folders `ckpt-<step>` in `home`; the newest and the best are kept."""

    def __init__(self, home: Path) -> None:
        self._files = LocalFiles(home)

    def write(
        self, state: Mapping[str, Array], settings: TrainSettings, place: RunProgress, graph: Mapping[str, object]
    ) -> str:
        """Writes one atomically, deletes those that are neither newest nor best, and returns its address.

        Args:
            state: From `GraphTrainer.state`.

        Raises:
            CheckpointError: it cannot be written; no earlier one has changed.
        """
        files, name, draft = self._files, _name(place.step), None
        try:
            for left in files.drafts():
                files.discard(left)
            if name in files.names():
                files.remove(name)
            draft = files.begin(name)
            parts = parts_of({key: [value] for key, value in state.items()}, {"elastable": _KIND})
            files.write(f"{draft}/{_TENSORS}", parts)
            manifest = _manifest(parts, settings, place, graph)
            files.commit(draft, name, [memoryview((json.dumps(manifest, indent=1) + "\n").encode())])
        except BaseException as error:
            if draft is not None:
                files.discard(draft)
            if isinstance(error, OSError):
                raise CheckpointError(f"checkpoint {files.at(name)} cannot be written: {error}") from error
            raise
        for old in self.names():
            if old not in (name, _name(place.best_step)):
                files.remove(old)
        return files.at(name)

    def names(self) -> list[str]:
        """Names of all complete ones, the oldest first."""
        return [name for name in self._files.names() if name.startswith("ckpt-")]

    def newest(self) -> GraphCheckpoint:
        """The newest one. Raises as `read`."""
        names = self.names()
        if not names:
            raise BadInput(f"there is no checkpoint in {self._files.address}")
        return self.read(names[-1])

    def best(self) -> GraphCheckpoint:
        """The one with the best validation MRR, or the newest if none was validated. Raises as `read`."""
        newest = self.newest()
        name = _name(newest.place.best_step)
        return self.read(name) if name in self.names() else newest

    def read(self, name: str) -> GraphCheckpoint:
        """Reads one and verifies its checksums. Raises CheckpointError if it is unreadable or damaged."""
        address = self._files.at(name)
        try:
            manifest = json.loads(self._files.read(f"{name}/{MANIFEST}").tobytes())
            if manifest.get("kind") != _KIND or manifest.get("format") != FORMAT:
                raise CheckpointError(
                    f"checkpoint {address} is of kind {manifest.get('kind')!r}, format {manifest.get('format')!r}; "
                    f"this command reads {_KIND!r} of format {FORMAT}"
                )
            if _checksum({key: value for key, value in manifest.items() if key != "checksum"}) != manifest["checksum"]:
                raise CheckpointError(f"checkpoint {address}: its manifest does not match its checksum")
            content = self._files.read(f"{name}/{_TENSORS}")
            if hashlib.sha256(content.data).hexdigest() != manifest["files"][_TENSORS]["sha256"]:
                raise CheckpointError(f"checkpoint {address}: {_TENSORS} does not match its checksum")
            state, _ = tensors_in(content)
            return GraphCheckpoint(
                {key: np.asarray(value) for key, value in state.items()},
                TrainSettings.from_json(manifest["settings"]),
                RunProgress(**manifest["place"]),
                manifest["graph"],
                address,
            )
        except UNREADABLE as error:
            raise CheckpointError(f"checkpoint {address} cannot be read: {error}") from error


def _manifest(
    parts: Sequence[memoryview], settings: TrainSettings, place: RunProgress, graph: Mapping[str, object]
) -> dict[str, object]:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    manifest: dict[str, object] = {
        "format": FORMAT,
        "kind": _KIND,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": settings.as_json(),
        "place": asdict(place),
        "graph": dict(graph),
        "files": {_TENSORS: {"sha256": digest.hexdigest(), "bytes": sum(len(part) for part in parts)}},
    }
    return {**manifest, "checksum": _checksum(manifest)}


def _name(step: int) -> str:
    return f"ckpt-{step:010d}"


def _checksum(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
