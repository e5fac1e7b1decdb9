"""Settings of knowledge-graph training: all but the graph that its numbers depend on; defaults by model and size."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Self, cast

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import available_cores
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.option import Option, check_options, setting
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, Corruption
from elastable.replicas.knowledge_graphs.losses import LOSSES, REGULARIZERS, SOFTMAX
from elastable.replicas.knowledge_graphs.scores.functions import SCORES, score_function, score_named

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
        None, _model("Standard deviation, or bound, of initial values.", above=0, unset="the score function's own")
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
        False, _negatives("Leave known training triples out of the negatives.", flags=("--filtered/--unfiltered",))
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
        4, _data("Evaluations without a better validation MRR before training ends; 0: never stop early.", at_least=0)
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


# Defaults of each model, found on CoDEx-S.
_PRODUCT: Mapping[str, object] = {
    "dim": 256,
    "loss": "whole-softmax",
    "optimizer": "adagrad",
    "learning_rate": 0.1,
    "regularizer": "n3",
    "regularization": 0.003,
    "batch": 512,
    "epochs": 40,
    "spread": 0.01,
}
_SAMPLED: Mapping[str, object] = {
    "dim": 256,
    "norm": 2,
    "loss": "softmax",
    "negatives": 64,
    "shared": False,
    "optimizer": "adagrad",
    "learning_rate": 0.05,
    "batch": 256,
    "epochs": 60,
    "evaluate_every": 5,
    "spread": 0.03,
}
_DISTANCE: Mapping[str, object] = {
    "dim": 128,
    "loss": "whole-softmax",
    "optimizer": "adam",
    "learning_rate": 0.003,
    "batch": 512,
    "epochs": 40,
}

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "ComplEx": _PRODUCT,
    "DistMult": _PRODUCT,
    "CP": _PRODUCT,
    "TransE": _SAMPLED,
    "RotatE": {name: value for name, value in _SAMPLED.items() if name != "norm"},
    "PairRE": _DISTANCE,
    "TripleRE": _DISTANCE,
    "InterHT": _DISTANCE,
    "TranS": _DISTANCE,
    "BoxE": {**_DISTANCE, "dim": 64},
    "TuckER": {**_DISTANCE, "dim": 100, "learning_rate": 0.001},
    "ConvE": {**_DISTANCE, "dim": 200, "learning_rate": 0.001},
}


def default_settings(model: str) -> dict[str, object]:
    """The defaults of a model, by names of `TrainSettings`. Raises BadInput for an unknown model."""
    name = score_named(model).name
    return {"model": name, **_DEFAULTS[name]}


def settings_of(model: str, given: Mapping[str, object]) -> TrainSettings:
    """The settings of a run: the given ones (None: not given), then the model's defaults.

    Raises:
        BadInput: as `TrainSettings`; a given one has no effect with the others.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = TrainSettings.from_json({**default_settings(model), **chosen})
    for names, idle, why in _IDLE:
        for name in names:
            if name in chosen and idle(settings):
                raise BadInput(f"{name}={chosen[name]!r} has no effect {why.format(settings)}; leave it out")
    return settings


_IDLE: tuple[tuple[tuple[str, ...], Callable[[TrainSettings], bool], str], ...] = (
    (
        ("negatives", "shared", "candidates", "filtered", "scheme"),
        lambda settings: settings.loss in WHOLE_LOSSES,
        "on the loss {0.loss}, which scores all entities",
    ),
    (
        ("margin", "adversarial"),
        lambda settings: settings.loss in (*WHOLE_LOSSES, SOFTMAX),
        "on the loss {0.loss}",
    ),
    (("corruption",), lambda settings: settings.reciprocal, "with reciprocal relations, whose queries ask for tails"),
    (("decay",), lambda settings: settings.schedule != "exponential", "on the schedule {0.schedule}"),
    (("regularization",), lambda settings: settings.regularizer == "none", "without a regularizer"),
)
"""Settings, when they change nothing, and why."""


DEFAULT_BUDGET_MINUTES = 40.0
"""What the defaults are chosen for, where no budget is given."""

_PRODUCT_PACE, _DISTANCE_PACE = 60e9, 8e9  # multiplications and additions a second and core; with AVX-512 up to 170e9
_EXPONENTIAL = 60  # of one score, in the same unit
_TRAINING = 0.9  # of the budget; the rest is for evaluations
_FEWEST_EPOCHS, _MOST_EPOCHS = 20, 200
_MOST_ENTITIES = 20_000  # of whole-softmax
_NEGATIVES = 2048


def planned_settings(
    model: str,
    given: Mapping[str, object],
    entities: int,
    triples: int,
    budget_minutes: float | None = None,
    cores: int | None = None,
) -> tuple[TrainSettings, tuple[str, ...]]:
    """The settings of a run on a graph of a size, and what was chosen by the size, with reasons.

    Settings that are given stay. A loss that is given, or one that scores a fixed number of negatives, leaves nothing
    to choose but the end.

    Args:
        model: Name of the score function.
        given: Settings by name; None: not given.
        entities, triples: Numbers of entities and of training triples.
        budget_minutes: Time for the run; None: 40 minutes, and no end by time.
        cores: Of the machine; None: those of this process.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if budget_minutes is not None:
        chosen["budget_minutes"] = budget_minutes
    settings = settings_of(model, chosen)
    if settings.loss != WHOLE_SOFTMAX or "loss" in chosen or settings.model not in _PLANNED:
        return settings, ()
    budget, cores = budget_minutes or DEFAULT_BUDGET_MINUTES, cores or available_cores()
    plan = _whole(settings, entities, triples, budget, cores)
    if plan is None:
        plan = _sampled(settings, entities, triples, budget, cores)
    if budget_minutes is not None and settings.schedule not in ("linear", "cosine"):
        ending = f"training ends after {_duration(budget_minutes)}, or when validation MRR stops rising"
        plan["epochs"] = (_MOST_EPOCHS, ending)
    names = [name for name in plan if name not in chosen and plan[name][0] != getattr(settings, name)]
    settings = settings_of(model, {**{name: plan[name][0] for name in names}, **chosen})
    return settings, tuple(f"{name} {plan[name][0]}: {plan[name][1]}" for name in names)


_PLANNED = ("ComplEx", "DistMult", "CP", "PairRE", "TripleRE", "InterHT", "TranS", "BoxE")
"""Models whose default is whole-softmax, and whose cost is that of comparing queries with all entities."""

_Plan = dict[str, tuple[object, str]]


def _whole(settings: TrainSettings, entities: int, triples: int, budget: float, cores: int) -> _Plan | None:
    """Whole-softmax with the largest dimension for which 20 epochs fit; None: there is none."""
    if entities > _MOST_ENTITIES:
        return None
    for dim in (settings.dim, *(less for less in (128, 64) if less < settings.dim)):
        seconds = _epoch_seconds(replace(settings, dim=dim), entities, triples, cores)
        fit = int(_TRAINING * 60 * budget / seconds)
        if fit < _FEWEST_EPOCHS:
            continue
        took = f"an epoch takes up to {seconds:.0f} s on {cores} cores"
        return {
            "dim": (
                dim,
                f"with {settings.dim} values, {_FEWEST_EPOCHS} epochs may take longer than {_duration(budget)}",
            ),
            "epochs": (min(settings.epochs, fit), f"{took}; these fit {_duration(budget)}"),
        }
    return None


def _sampled(settings: TrainSettings, entities: int, triples: int, budget: float, cores: int) -> _Plan:
    """A sampled softmax, with the dimension of the model's defaults if all its epochs fit."""
    seconds = _epoch_seconds(settings, _NEGATIVES, triples, cores)
    fits = settings.epochs * seconds <= _TRAINING * 60 * budget
    why = f"all {entities:,} entities at every step take too long; a sample corrected by its size estimates them"
    return {
        "loss": (SOFTMAX, why),
        "negatives": (_NEGATIVES, "shared by the triples of a step, one matrix product"),
        "dim": (
            settings.dim if fits else min(128, settings.dim),
            f"with {settings.dim} values, {settings.epochs} epochs may take longer than {_duration(budget)}",
        ),
        "evaluate_every": (4, "an evaluation scores all entities"),
    }


def _duration(minutes: float) -> str:
    return f"{minutes:g} minutes" if minutes >= 1 else f"{60 * minutes:g} s"


def _epoch_seconds(settings: TrainSettings, entities: int, triples: int, cores: int) -> float:
    score = score_function(settings.model, settings.dim, settings.norm)
    pace = _PRODUCT_PACE if score.comparison.is_product else _DISTANCE_PACE
    scores = 2.0 * triples * entities  # both directions
    return scores * (6 * score.entity_width + _EXPONENTIAL) / (pace * cores)
