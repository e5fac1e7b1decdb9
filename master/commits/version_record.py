"""Everything of a version but its rows, as the bytes that a store keeps with it."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.errors import BadInput, BadSpec, CheckpointError
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.api import JobSpec, Tensor
from elastable.master.checkpoints.storage.tensor_file import parts_of, tensors_in
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule

_FORMAT = 1
_NOTE = "elastable"
_NO_JOB: tuple[type[Exception], ...] = (BadInput, BadSpec, *MALFORMED)


def job_as_json(job: JobSpec) -> dict[str, object]:
    """A job's description as it is stored, without passwords."""
    return {**dataclasses.asdict(job), "store_url": redacted(job.store_url)}


def job_from_json(saved: Mapping[str, Any]) -> JobSpec:
    """A job from its description. Raises `CheckpointError` where that is malformed."""
    known = {each.name for each in dataclasses.fields(JobSpec)}
    try:
        job = JobSpec(**{name: value for name, value in saved.items() if name in known})
        Schedule(job)
    except _NO_JOB as error:
        raise CheckpointError(f"{str(saved)[:200]} describes no job: {error}") from error
    return job


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The part of a version that is not rows.

    A store that outlives the master keeps it in the transaction that commits the version: a master that takes over
    continues from there.

    Attributes:
        job: The description of the job (`job_as_json`).
        progress: How far the job is; `progress.version` is the version.
        dense: Dense variables, states and optimizer variables by key.
    """

    job: Mapping[str, object]
    progress: Progress
    dense: Mapping[str, Tensor]

    def to_bytes(self) -> bytes:
        """As one safetensors file; every number to the bit."""
        progress = dataclasses.replace(self.progress, metrics=())
        metrics = {f"metrics/{place:05d}": np.asarray(tensor) for place, tensor in enumerate(self.progress.metrics)}
        tensors = {**metrics, **{f"dense/{key}": np.asarray(tensor) for key, tensor in self.dense.items()}}
        content = {"format": _FORMAT, "job": dict(self.job), "progress": json.loads(progress.to_json())}
        return b"".join(parts_of({key: [tensor] for key, tensor in tensors.items()}, {_NOTE: json.dumps(content)}))

    @classmethod
    def from_bytes(cls, record: bytes) -> Self:
        """What `to_bytes` gave.

        Raises:
            CheckpointError: the bytes are malformed.
        """
        try:
            tensors, note = tensors_in(np.frombuffer(record, np.uint8))
            content = json.loads(note[_NOTE])
            if content["format"] != _FORMAT:
                raise CheckpointError(
                    f"the store's record has format {content['format']!r}; this version reads {_FORMAT}"
                )
            metrics = tuple(tensors[key] for key in sorted(tensors) if key.startswith("metrics/"))
            progress = dataclasses.replace(Progress.from_json(json.dumps(content["progress"])), metrics=metrics)
            dense = {key.removeprefix("dense/"): tensors[key] for key in tensors if key.startswith("dense/")}
            return cls(content["job"], progress, dense)
        except MALFORMED as error:
            raise CheckpointError(f"{len(record)} bytes in the store are no record of a version: {error}") from error
