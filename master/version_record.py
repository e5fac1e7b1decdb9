"""What stands with a version beside its rows, as the bytes that a store keeps with it.

A store that outlives the master (Redis) keeps this record, in the transaction
that makes the version stand. So whoever takes over from a master that died goes
on from that very version: dense variables, states, optimizer, place in the job.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from embedding_store.errors import CheckpointError
from embedding_store.redis.url import redacted
from master.api import JobSpec, Tensor
from master.progress import Progress
from master.tensor_bytes import from_plain, to_plain

__all__ = ["VersionRecord", "job_as_json"]

_FORMAT = 1


def job_as_json(job: JobSpec) -> dict[str, Any]:
    """A job's description as it is kept, without passwords."""
    return {**dataclasses.asdict(job), "store_url": redacted(job.store_url)}


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The part of a version that is not rows.

    Attributes:
        job: The description of the job (`job_as_json`).
        progress: Its place; `progress.version` is the version.
        dense: Dense variables, states and optimizer variables by key.
    """

    job: Mapping[str, Any]
    progress: Progress
    dense: Mapping[str, Tensor]

    def to_bytes(self) -> bytes:
        """As one safetensors file; every number to the bit."""
        progress = dataclasses.replace(self.progress, metrics=())
        metrics = {f"metrics/{place:05d}": np.asarray(tensor) for place, tensor in enumerate(self.progress.metrics)}
        tensors, dtypes = to_plain({**metrics, **{f"dense/{key}": tensor for key, tensor in self.dense.items()}})
        told = {
            "format": _FORMAT,
            "job": dict(self.job),
            "progress": json.loads(progress.to_json()),
            "dtypes": dtypes,
        }
        saved: bytes = save({"told": np.frombuffer(json.dumps(told).encode(), np.uint8), **tensors})
        return saved

    @classmethod
    def from_bytes(cls, record: bytes) -> Self:
        """What `to_bytes` gave.

        Raises:
            CheckpointError: the bytes are nothing of the kind.
        """
        try:
            tensors = load(record)
            told = json.loads(tensors.pop("told").tobytes())
            if told["format"] != _FORMAT:
                raise CheckpointError(f"the store's record has format {told['format']!r}; this version reads {_FORMAT}")
            tensors = from_plain(tensors, told["dtypes"])
            metrics = tuple(tensors[key] for key in sorted(tensors) if key.startswith("metrics/"))
            progress = dataclasses.replace(Progress.from_json(json.dumps(told["progress"])), metrics=metrics)
            dense = {key.removeprefix("dense/"): tensors[key] for key in tensors if key.startswith("dense/")}
            return cls(told["job"], progress, dense)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{len(record)} bytes in the store are no record of a version: {error}") from error
