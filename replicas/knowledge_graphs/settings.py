"""Settings of knowledge-graph training: everything but the graph that the numbers depend on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Self, cast

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.option import Option, check_options, setting
from elastable.replicas.knowledge_graphs.graph import CORRUPTIONS, Corruption
from elastable.replicas.knowledge_graphs.losses import LOSSES, REGULARIZERS
from elastable.replicas.knowledge_graphs.scores import SCORES, score_function

__all__ = ["KVSALL", "WHOLE_LOSSES", "WHOLE_SOFTMAX", "TrainSettings"]

WHOLE_SOFTMAX = "whole-softmax"
"""The cross-entropy of an answer among all entities."""

KVSALL = "kvsall"
"""The binary cross-entropy of every (head, relation) with all entities."""

WHOLE_LOSSES = (WHOLE_SOFTMAX, KVSALL)
"""The losses without negatives."""

_data = partial(Option, group="Training")
_model = partial(Option, group="The model")
_negatives = partial(Option, group="Loss and negatives")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """All settings of a training run; every field says what it means.

    Raises:
        BadInput: a value that is not allowed; names it and what is.
    """

    model: str = setting("ComplEx", _model(f"Score function: {', '.join(SCORES)}."))
    dim: int = setting(256, _model("Dimension of an entity.", at_least=1))
    norm: int | None = setting(
        None,
        _model(
            "Norm of distances, 1 or 2, of a score that has a choice (docs/knowledge-graphs.md).",
            at_least=1,
            unset="the score function's own",
        ),
    )
    spread: float | None = setting(
        None,
        _model("Standard deviation, or bound, of initial values.", above=0, unset="the score function's own"),
    )
    reciprocal: bool = setting(
        True,
        _model("Train every triple in both directions, each with its own relation; all queries then ask for tails."),
    )
    scheme: str = setting(
        "score-moving",
        _model("What workers exchange: scores or embeddings.", choices=("score-moving", "embedding-moving")),
    )
    loss: str = setting(
        WHOLE_SOFTMAX,
        _negatives(
            "whole-softmax is the cross-entropy over all entities, kvsall the binary one with all answers of a query; "
            "the others need negatives.",
            choices=(*WHOLE_LOSSES, *LOSSES),
        ),
    )
    loss_scale: float = setting(1.0, _negatives("Factor of the loss, not of the regularizer.", above=0))
    label_smoothing: float = setting(
        0.0, _negatives("Share of the label that is spread over all entities, 0 to below 1.", at_least=0)
    )
    margin: float = setting(0.0, _negatives("Margin of the loss.", at_least=0))
    adversarial: float = setting(
        0.0, _negatives("Temperature of self-adversarial weights of negatives; 0: equal weights.", at_least=0)
    )
    negatives: int = setting(
        256, _negatives("Negatives that each triple is scored with, for any number of workers.", at_least=1)
    )
    shared: bool = setting(
        True, _negatives("Whether the triples of a step share negatives.", flags=("--shared/--per-triple",))
    )
    candidates: str = setting(
        "random",
        _negatives(
            "Where negatives come from: any entity, or one of the type of what it replaces, which cannot be shared.",
            choices=("random", "typed"),
        ),
    )
    corruption: Corruption = setting(
        "ht", _negatives("Which end of a triple negatives replace: head, tail or both.", choices=CORRUPTIONS)
    )
    filtered: bool = setting(
        False,
        _negatives("Leave known training triples out of the negatives.", flags=("--filtered/--unfiltered",)),
    )
    augment_negative: bool = setting(
        False,
        _negatives("Score a triple with the tails of the step's other triples, too.", flags=("--augment-negative",)),
    )
    dropout: float = setting(
        0.0, _model("Share of a query's entity and relation values that are set to 0, 0 to below 1.", at_least=0)
    )
    batch: int = setting(512, _data("Triples in a step, over all workers.", at_least=1))
    epochs: int = setting(40, _data("Largest number of epochs.", at_least=1))
    optimizer: str = setting("adagrad", _data("A fused optimizer of the store: adagrad, adam, ..."))
    learning_rate: float = setting(0.1, _data("Learning rate at the start.", at_least=0))
    schedule: str = setting(
        "constant",
        _data(
            "Learning-rate schedule; linear and cosine fall to 0 at the end of all epochs, exponential by --decay an "
            "epoch.",
            choices=("constant", "linear", "cosine", "exponential"),
        ),
    )
    decay: float = setting(0.95, _data("Factor of the learning rate an epoch, of the exponential schedule.", above=0))
    warmup_epochs: float = setting(
        0.0, _data("Epochs in which the learning rate rises to the schedule's.", at_least=0, metavar="EPOCHS")
    )
    regularizer: str = setting("none", _data("Penalty on the rows of the step's triples.", choices=REGULARIZERS))
    regularization: float = setting(0.0, _data("Weight of the regularizer.", at_least=0))
    sampling: str = setting(
        "rigid",
        _data("rigid trains every triple once an epoch; random draws with replacement.", choices=("rigid", "random")),
    )
    weighting: str = setting(
        "equal", _data("Weights of triples (docs/knowledge-graphs.md).", choices=("equal", "frequency"))
    )
    evaluate_every: int = setting(3, _data("Epochs between evaluations.", at_least=1, metavar="EPOCHS"))
    patience: int = setting(
        4,
        _data("Evaluations without a better validation MRR before training ends; 0: never stop early.", at_least=0),
    )
    budget_minutes: float | None = setting(
        None,
        _data("Minutes after which the run ends, evaluations included.", above=0, metavar="MINUTES", unset="no end"),
    )
    seed: int = setting(0, _data("Seed of initial values, shards, the order of triples, and negatives."))

    def __post_init__(self) -> None:
        check_options(self, python=True)
        self._check_losses()
        if self.candidates == "typed" and (self.shared or self.loss in WHOLE_LOSSES):
            raise BadInput(
                "candidates of the type of what they replace are drawn for each triple, of a loss with negatives; "
                f"got shared={self.shared}, loss {self.loss!r}"
            )
        score = score_function(self.model, self.dim, self.norm)
        object.__setattr__(self, "model", score.name)
        if not self.reciprocal:
            for side in score.sides if self.loss in WHOLE_LOSSES else ():
                score.require_side(side)
            if "head" not in score.sides:
                raise BadInput(f"{score.name} answers tail queries only: train it with reciprocal relations")
        optimizer = row_optimizer(self.optimizer_spec)
        if not optimizer.fused:
            raise BadInput(f"optimizer {self.optimizer!r} is not a fused one")

    def _check_losses(self) -> None:
        for name in ("label_smoothing", "dropout"):
            if getattr(self, name) >= 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be from 0 to below 1")
        if self.label_smoothing and self.loss not in WHOLE_LOSSES:
            raise BadInput(
                f"label_smoothing is of losses over all entities, {' and '.join(WHOLE_LOSSES)}; got loss {self.loss!r}"
            )
        if self.loss == KVSALL and (not self.reciprocal or self.weighting != "equal"):
            raise BadInput(
                "kvsall trains every (head, relation) once, with all its tails: it needs reciprocal relations and "
                f"equal weights; got reciprocal={self.reciprocal}, weighting {self.weighting!r}"
            )
        if self.augment_negative and self.loss in WHOLE_LOSSES:
            raise BadInput(f"augment_negative adds negatives; the loss {self.loss!r} has none")
        if self.augment_negative and not (self.shared and self.reciprocal and self.candidates == "random"):
            raise BadInput(
                "augment_negative adds the tails of the step's triples to random candidates that they share: it needs "
                f"shared negatives, reciprocal relations and random candidates; got shared={self.shared}, "
                f"reciprocal={self.reciprocal}, candidates {self.candidates!r}"
            )

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer of entities, relations and further variables."""
        start = {"initial_accumulator_value": 0.0, "epsilon": 1e-10} if self.optimizer == "adagrad" else {}
        return OptimizerSpec.of(self.optimizer, learning_rate=self.learning_rate, lazy=True, **start)

    @property
    def ends(self) -> Corruption:
        """The ends that candidates replace: with reciprocal relations, tails only."""
        return "t" if self.reciprocal else self.corruption

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, given the number of steps in all epochs."""
        epoch = step * self.epochs / steps
        warm = min(1.0, (step + 1) * self.epochs / steps / self.warmup_epochs) if self.warmup_epochs else 1.0
        if self.schedule == "linear":
            return warm * self.learning_rate * max(0.0, 1 - step / steps)
        if self.schedule == "cosine":
            return warm * self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return warm * self.learning_rate * (self.decay**epoch if self.schedule == "exponential" else 1.0)

    def as_json(self) -> dict[str, object]:
        """JSON values by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """The inverse of `as_json`; missing names get defaults. Raises BadInput for unknown names."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise BadInput(f"settings of a knowledge graph have no {', '.join(unknown)}")
        return cast(Callable[..., Self], cls)(**values)
