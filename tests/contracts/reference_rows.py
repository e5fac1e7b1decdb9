"""Every fused optimizer's rule for one row, written plainly in numpy float32, from Keras 3.15's sources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.optimizers.registry import row_optimizer
from tests.untyped import Keywords

F = np.float32
ONE = F(1)
Values = Mapping[str, float]
Slots = list[np.ndarray]
Rule = Callable[[np.ndarray, Slots, np.ndarray, int, F, Values], tuple[np.ndarray, Slots]]
"""(weights after decay, slots, gradient, step, rate, hyperparameters) -> (weights, slots)."""


def power(base: float, exponent: int) -> np.float32:
    """In double, rounded once: see elastable.embedding_store.optimizers.fused."""
    return F(float(F(base)) ** exponent)


def sgd(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    if not h["momentum"]:
        return w - g * rate, []
    momentum = F(h["momentum"])
    m = slots[0] * momentum - g * rate
    return w + ((m * momentum - g * rate) if h["nesterov"] else m), [m]


def adagrad(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    a = slots[0] + g * g
    return w - rate * g / np.sqrt(a + F(h["epsilon"])), [a]


def adam(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    alpha = rate * np.sqrt(ONE - power(h["beta_2"], step + 1)) / (ONE - power(h["beta_1"], step + 1))
    m = slots[0] + (g - slots[0]) * F(1 - h["beta_1"])
    v = slots[1] + (g * g - slots[1]) * F(1 - h["beta_2"])
    largest = [np.maximum(slots[2], v)] if h["amsgrad"] else []
    return w - m * alpha / (np.sqrt([v, *largest][-1]) + F(h["epsilon"])), [m, v, *largest]


def adamax(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    m = slots[0] + (g - slots[0]) * F(1 - h["beta_1"])
    u = np.maximum(F(h["beta_2"]) * slots[1], np.abs(g))
    return w - rate * m / ((ONE - power(h["beta_1"], step + 1)) * (u + F(h["epsilon"]))), [m, u]


def nadam(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    def decay(t: int) -> np.float32:
        return ONE - F(0.5) * power(0.96, t)

    product = ONE
    for t in range(1, step + 2):
        product = product * F(h["beta_1"]) * decay(t)
    now, following = F(h["beta_1"]) * decay(step + 1), F(h["beta_1"]) * decay(step + 2)
    m = slots[0] + (g - slots[0]) * (ONE - F(h["beta_1"]))
    v = slots[1] + (g * g - slots[1]) * (ONE - F(h["beta_2"]))
    m_hat = following * m / (ONE - product * following) + (ONE - now) * g / (ONE - product)
    return w - m_hat * rate / (np.sqrt(v / (ONE - power(h["beta_2"], step + 1))) + F(h["epsilon"])), [m, v]


def adadelta(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    rho, share, epsilon = F(h["rho"]), F(1 - h["rho"]), F(h["epsilon"])
    a = rho * slots[0] + share * (g * g)
    change = -(np.sqrt(slots[1] + epsilon) * g / np.sqrt(a + epsilon))
    return w + rate * change, [a, rho * slots[1] + share * (change * change)]


def rmsprop(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    rho, share = F(h["rho"]), F(1 - h["rho"])
    v = rho * slots[0] + share * (g * g)
    after, denominator = [v], v + F(h["epsilon"])
    mean = None
    if h["centered"]:
        mean = rho * slots[-1] + share * g
        denominator = v - mean * mean + F(h["epsilon"])
    change = rate * g / np.sqrt(denominator)
    if h["momentum"]:
        change = F(h["momentum"]) * slots[1] + change
        after.append(change)
    return w - change, after if mean is None else [*after, mean]


def ftrl(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    def grown(values: np.ndarray) -> np.ndarray:
        raised: np.ndarray = (values.astype(np.float64) ** -h["learning_rate_power"]).astype(np.float32)
        return raised

    l1 = F(h["l1_regularization_strength"])
    l2 = F(h["l2_regularization_strength"]) + F(h["beta"]) / (F(2) * rate)
    a = slots[0] + g * g
    shrunk = g + F(2 * h["l2_shrinkage_regularization_strength"]) * w
    linear = slots[1] + (shrunk - (grown(a) - grown(slots[0])) / rate * w)
    return (np.clip(linear, -l1, l1) - linear) / (grown(a) / rate + F(2) * l2), [a, linear]


def lion(w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values) -> tuple[np.ndarray, Slots]:
    beta_1, beta_2 = F(h["beta_1"]), F(h["beta_2"])
    direction = slots[0] * beta_1 + g * (ONE - beta_1)
    return w - rate * np.sign(direction), [slots[0] * beta_2 + g * (ONE - beta_2)]


def rowwise_adagrad(
    w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: F, h: Values
) -> tuple[np.ndarray, Slots]:
    squares = g * g
    whole = len(g) - len(g) % 16
    lanes = np.zeros(16, np.float32)
    for block in squares[:whole].reshape(-1, 16):
        lanes = lanes + block
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width:]
    total = lanes[0]
    for square in squares[whole:]:
        total = total + square
    a = slots[0] + total / F(len(g))
    return w - (rate / (np.sqrt(a[0]) + F(h["epsilon"]))) * g, [a]


@dataclass(frozen=True)
class Reference:
    """What the tests need to know of a fused optimizer.

    Attributes:
        rule: Its step on one row.
        rate: A learning rate with which a few steps move a row visibly.
        variants: Other hyperparameters to train with; together they set each one that it has.
    """

    rule: Rule
    rate: float
    variants: tuple[Keywords, ...]

    @property
    def trained(self) -> list[Keywords]:
        """The hyperparameters of the default and of each variant, with the learning rate."""
        return [{"learning_rate": self.rate, **variant} for variant in ({}, *self.variants)]


def _of(rule: Rule, rate: float, *variants: Keywords) -> Reference:
    return Reference(rule, rate, variants)


_BETAS = {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-4}
_NESTEROV = {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}
_START = {"initial_accumulator_value": 0.3, "epsilon": 1e-3, "weight_decay": 0.02}
_PENALTIES = {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.1, "beta": 0.3}
_POWER = {"learning_rate_power": -0.7, "initial_accumulator_value": 0.2, "weight_decay": 0.01}

REFERENCES: Mapping[str, Reference] = {
    "sgd": _of(sgd, 0.2, {"weight_decay": 0.1}, {"momentum": 0.9}, _NESTEROV),
    "adagrad": _of(adagrad, 0.2, _START),
    "adam": _of(adam, 0.01, _BETAS, {"beta_1": 0.8, "beta_2": 0.99, "amsgrad": True, "weight_decay": 0.01}),
    "adamw": _of(adam, 0.01, {**_BETAS, "weight_decay": 0.1, "amsgrad": True}),
    "rmsprop": _of(
        rmsprop,
        0.01,
        {"momentum": 0.5, "epsilon": 1e-3},
        {"centered": True, "rho": 0.8},
        {"centered": True, "momentum": 0.9, "weight_decay": 0.01},
    ),
    "adadelta": _of(adadelta, 0.5, {"rho": 0.5, "epsilon": 1e-3, "weight_decay": 0.02}),
    "adamax": _of(adamax, 0.01, {**_BETAS, "weight_decay": 0.02}),
    "nadam": _of(nadam, 0.01, {**_BETAS, "weight_decay": 0.02}),
    "ftrl": _of(ftrl, 0.1, _PENALTIES, {**_POWER, "l2_shrinkage_regularization_strength": 0.05}),
    "lion": _of(lion, 0.01, {"beta_1": 0.8, "beta_2": 0.9, "weight_decay": 0.01}),
    "rowwise_adagrad": _of(rowwise_adagrad, 0.2, _START),
}
"""Each fused optimizer. The tests of optimizers, of Keras' optimizers and of programs take theirs from here."""


def stepped(
    name: str, w: np.ndarray, slots: Slots, g: np.ndarray, step: int, rate: float, h: Values
) -> tuple[np.ndarray, Slots]:
    """One row after one step, decay first, as Keras decays."""
    decayed = w - w * F(h["weight_decay"]) * F(rate)
    return REFERENCES[name].rule(decayed, slots, g, step, F(rate), h)


StepRow = Callable[[np.ndarray, "np.ndarray | None", np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""(weights, slots side by side or None for a row never updated, gradient, step) -> (weights, slots)."""


def row_step(spec: OptimizerSpec, rate: float | None = None) -> StepRow:
    """One step of an optimizer on one row, at its own learning rate or another one."""
    optimizer = row_optimizer(spec)
    taken = optimizer.default_learning_rate if rate is None else rate

    def step_row(w: np.ndarray, slots: np.ndarray | None, g: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        widths = [len(w) if slot.columns is None else slot.columns for slot in optimizer.slots]
        before = optimizer.initial_slots(len(w)) if slots is None else slots
        parts = np.split(before, np.cumsum(widths)[:-1]) if widths else []
        w, after = stepped(spec.name, w, parts, g, step, taken, optimizer.hyperparameters)
        return w, np.concatenate([np.empty(0, np.float32), *after])

    return step_row
