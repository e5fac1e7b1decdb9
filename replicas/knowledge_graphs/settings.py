"""What a knowledge-graph model is trained by: everything that its numbers depend on, but for the graph."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, Corruption
from elastable.replicas.knowledge_graphs.losses.losses import LOSSES
from elastable.replicas.knowledge_graphs.losses.regularizer import REGULARIZERS
from elastable.replicas.knowledge_graphs.scores import score_function

__all__ = ["WHOLE_SOFTMAX", "TrainSettings"]

WHOLE_SOFTMAX = "whole-softmax"
"""The loss that needs no negatives: cross-entropy over all entities."""

_SCHEMES = ("score-moving", "embedding-moving")
_SCHEDULES = ("constant", "linear", "cosine")
_WEIGHTINGS = ("equal", "frequency")
_SAMPLINGS = ("rigid", "random")
_CANDIDATES = ("random", "typed")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """All settings of a training run.

    Attributes:
        model: A score function, of `elastable.replicas.knowledge_graphs.scores.SCORES`.
        dim: Its dimension.
        norm: Of distances, 1 or 2; None: the score function's own.
        spread: Standard deviation, or bound, of initial values; None: the score function's own.
        loss: "whole-softmax", or one of `elastable.replicas.knowledge_graphs.losses.losses.LOSSES`.
        margin: Of the loss.
        adversarial: Temperature of self-adversarial weights; 0: equal ones.
        negatives: Candidates of a triple (or, shared, of all of a worker's triples) in all.
        shared: Whether a worker's triples share candidates.
        candidates: "random": any entity; "typed": one of the type of what it replaces, which cannot be shared.
        corruption: Which end candidates replace: "h", "t" or "ht".
        filtered: Whether candidates that make a known training triple do not count.
        scheme: "score-moving" or "embedding-moving".
        reciprocal: Whether every triple is trained in both directions, with a
            relation of its own for each; ends are then asked for as tails alone.
        batch: Triples of a step, over all workers.
        epochs: At most.
        optimizer: A fused optimizer of the store.
        learning_rate: At the start.
        schedule: "constant"; "linear" or "cosine": down to 0 at the end of all epochs.
        regularizer: "none", "l2" or "n3", of the rows of the step's triples.
        regularization: Its weight.
        sampling: "rigid": every triple once an epoch; "random": drawn with replacement.
        weighting: "equal", or "frequency" (`elastable.replicas.knowledge_graphs.graph.frequency`).
        evaluate_every: Epochs between evaluations.
        patience: Evaluations without a better validation MRR, after which training ends; 0: never.
        seed: Of initial values, shards, the order of triples, and candidates.

    Raises:
        BadInput: a value that cannot be; names it and what can.
    """

    model: str = "ComplEx"
    dim: int = 256
    norm: int | None = None
    spread: float | None = None
    loss: str = WHOLE_SOFTMAX
    margin: float = 0.0
    adversarial: float = 0.0
    negatives: int = 256
    shared: bool = True
    candidates: str = "random"
    corruption: Corruption = "ht"
    filtered: bool = False
    scheme: str = "score-moving"
    reciprocal: bool = True
    batch: int = 512
    epochs: int = 40
    optimizer: str = "adagrad"
    learning_rate: float = 0.1
    schedule: str = "constant"
    regularizer: str = "none"
    regularization: float = 0.0
    sampling: str = "rigid"
    weighting: str = "equal"
    evaluate_every: int = 3
    patience: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dim", "batch", "epochs", "negatives", "evaluate_every"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("margin", "adversarial", "learning_rate", "regularization", "patience"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise BadInput(f"{name} must be a number from 0, got {getattr(self, name)}")
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread > 0):
            raise BadInput(f"spread must be above 0, got {self.spread}")
        self._one_of("loss", (WHOLE_SOFTMAX, *LOSSES))
        self._one_of("corruption", CORRUPTIONS)
        self._one_of("scheme", _SCHEMES)
        self._one_of("schedule", _SCHEDULES)
        self._one_of("regularizer", REGULARIZERS)
        self._one_of("weighting", _WEIGHTINGS)
        self._one_of("sampling", _SAMPLINGS)
        self._one_of("candidates", _CANDIDATES)
        if self.candidates == "typed" and (self.shared or self.loss == WHOLE_SOFTMAX):
            raise BadInput(
                "candidates of the type of what they replace are drawn for each triple, of a loss with negatives; "
                f"got shared={self.shared}, loss {self.loss!r}"
            )
        score = score_function(self.model, self.dim, self.norm)
        object.__setattr__(self, "model", score.name)
        if not self.reciprocal:
            for side in score.sides if self.loss == WHOLE_SOFTMAX else ():
                score.require_side(side)
            if "head" not in score.sides:
                raise BadInput(f"{score.name} asks for tails only: train it with reciprocal relations")
        optimizer = row_optimizer(self.optimizer_spec)
        if not optimizer.fused:
            raise BadInput(f"optimizer {self.optimizer!r} is not a fused one")

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """Of entities, relations and further variables."""
        start = {"initial_accumulator_value": 0.0, "epsilon": 1e-10} if self.optimizer == "adagrad" else {}
        return OptimizerSpec.of(self.optimizer, learning_rate=self.learning_rate, lazy=True, **start)

    @property
    def ends(self) -> Corruption:
        """Which end candidates replace: with reciprocal relations, tails alone."""
        return "t" if self.reciprocal else self.corruption

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, of so many in all epochs."""
        if self.schedule == "linear":
            return self.learning_rate * max(0.0, 1 - step / steps)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return self.learning_rate

    def as_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """What `as_json` gave. Raises BadInput where names are unknown."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise BadInput(f"settings of a knowledge graph have no {', '.join(unknown)}")
        return cls(**values)

    def _one_of(self, name: str, known: tuple[str, ...] | Any) -> None:
        if getattr(self, name) not in known:
            raise BadInput(f"{name} {getattr(self, name)!r}: known are {', '.join(known)}")
