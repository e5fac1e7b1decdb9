"""How far a job is: what a checkpoint holds besides tensors and rows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.contract.malformed import MALFORMED, Document, DocumentFields
from elastable.embedding_store.errors import CheckpointError
from elastable.master.api import Tensor


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, between two versions; `Progress(version)` is enough for a sync job.

    Attributes:
        version: The current version; in sync mode it is the position in the schedule.
        evaluated: Whether `version` ends an epoch that has been evaluated and reported to the hooks.
        records: Records trained.
        metrics: Summed metric state of the running epoch.
        epoch: Async: the current epoch.
        done: Async: the micro-batches of that epoch that `version` contains.
        sequences: Async: the last sequence of every worker incarnation.
        logs: Results of the last epoch that ended, of both splits.
        hooks: The hooks' state (`Hooks.state`): in a checkpoint after `on_version` was called for `version`, in the
            record of a commit before.
        stream: Of a job on a stream: `StreamSchedule.kept`.
    """

    version: int = 0
    evaluated: bool = False
    records: int = 0
    metrics: tuple[Tensor, ...] = ()
    epoch: int = 0
    done: tuple[int, ...] = ()
    sequences: Mapping[str, int] = field(default_factory=dict)
    logs: Mapping[str, float] = field(default_factory=dict)
    hooks: DocumentFields = field(default_factory=dict)
    stream: DocumentFields = field(default_factory=dict)

    def to_json(self) -> str:
        """As one JSON object; floats are kept to the bit."""
        fields: Document = {name: getattr(self, name) for name in self.__slots__}
        fields |= {name: dict(fields[name]) for name in ("sequences", "logs", "hooks", "stream")}
        fields["metrics"] = [
            {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "values": tensor.ravel().tolist()}
            for tensor in self.metrics
        ]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        """What `to_json` wrote.

        Raises:
            CheckpointError: the text is malformed.
        """
        try:
            fields = json.loads(text)
            metrics = tuple(
                np.array(entry["values"], entry["dtype"]).reshape(entry["shape"]) for entry in fields.pop("metrics")
            )
            return cls(**{**fields, "done": tuple(fields["done"]), "metrics": metrics})
        except MALFORMED as error:
            raise CheckpointError(f"{text[:200]!r} is no progress of a job: {error}") from error
