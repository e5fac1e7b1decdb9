"""Optimizers over rows as numba kernels: those of Keras, lazily, and row-wise Adagrad.

Formulas, defaults and hyperparameter names are those of Keras 3.15 (`keras/src/optimizers/*.py`), operation by
operation in float32, so that on rows that have a gradient at every step the numbers are Keras' own.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.native.intrinsics import lane_squares
from elastable.embedding_store.native.kernel import (
    by_whole_lines,
    inlined,
    kernel,
    prefetch,
    prefetch_columns,
    prefetch_distance,
)
from elastable.embedding_store.optimizers.base import DenseForm, RowOptimizer, SlotSpec

F = np.float32

_ONE = F(1)


# The one loop over rows that the optimizers run, compiled for the step of each on a single value


Scalars = tuple[float | np.floating, ...]
"""What a step needs besides the rows, the same for all of them."""

ValueStep = Callable[..., tuple[F, ...]]
"""`step(weight, gradient, *slots, rate, scalars)`: the new weight and the new slots, all float32.

The weight has been decayed already. Compiled into the loop, so it calls kernels and numpy's functions alone.
"""

_Arguments = tuple[Float32, Int64, Float32, Int64, Float32, F, F, Scalars]

UpdateKernel = Callable[[int, _Arguments], None]
"""`update(dim, (weights, places, slots, positions, gradients, rate, decay, scalars))`, as of `RowOptimizer`."""

_Columns = Callable[[Float32, Float32, Float32, int, F, F, Scalars], None]
"""All values of one row: `columns(weights, slots, gradients, dim, rate, decay, scalars)`."""


def update_kernel(step: ValueStep, slots: int, twice: bool = False) -> UpdateKernel:
    """A kernel that takes an optimizer's step on every value of some rows.

    Args:
        step: The optimizer's step on one value.
        slots: How many slots it has, each as wide as the weights: 0 to 3.
        twice: Whether the loop is compiled once more for rows of whole cache lines, for optimizers that are limited
            by computation.
    """
    value = inlined(step)
    columns = (_without_slots, _with_slot, _with_2_slots, _with_3_slots)[slots](value)

    def rows(dim: int, arguments: _Arguments) -> None:
        weights, places, states, positions, gradients, rate, decay, scalars = arguments
        last, ahead = len(gradients) - 1, prefetch_distance(dim)
        for i in range(len(gradients)):
            later = min(i + ahead, last)
            prefetch_columns(weights, places[later], dim)
            prefetch_columns(states, positions[later], slots * dim)
            columns(weights[places[i]], states[positions[i]], gradients[i], dim, rate, decay, scalars)

    return kernel(by_whole_lines(rows) if twice else rows)


def _without_slots(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        for j in range(dim):
            (w[j],) = step(w[j] - w[j] * decay * rate, g[j], rate, scalars)

    return columns


def _with_slot(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        for j in range(dim):
            w[j], s[j] = step(w[j] - w[j] * decay * rate, g[j], s[j], rate, scalars)

    return columns


def _with_2_slots(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        a, b = s[:dim], s[dim : 2 * dim]
        for j in range(dim):
            w[j], a[j], b[j] = step(w[j] - w[j] * decay * rate, g[j], a[j], b[j], rate, scalars)

    return columns


def _with_3_slots(step: ValueStep) -> _Columns:
    @inlined
    def columns(w: Float32, s: Float32, g: Float32, dim: int, rate: F, decay: F, scalars: Scalars) -> None:
        a, b, c = s[:dim], s[dim : 2 * dim], s[2 * dim : 3 * dim]
        for j in range(dim):
            w[j], a[j], b[j], c[j] = step(w[j] - w[j] * decay * rate, g[j], a[j], b[j], c[j], rate, scalars)

    return columns


# What the optimizers share, and the step of each


_FLOAT32_MAX = float(np.finfo(F).max)


class KernelOptimizer(RowOptimizer):
    """An optimizer whose kernel updates rows in place.

    Attributes:
        defaults: All its hyperparameters.
        shares: Those that must lie from 0 to 1.
        below_one: Those whose power a step takes from 1, to divide by: where that is 0, weights become NaN.
        kernel: Updates rows.
    """

    defaults: Mapping[str, float]
    shares: tuple[str, ...] = ()
    below_one: tuple[str, ...] = ()
    kernel: UpdateKernel

    def __init__(self, spec: OptimizerSpec) -> None:
        """Raises `BadSpec` for an unknown hyperparameter, and for one that is not finite or out of range."""
        self.spec = spec
        values = self.hyperparameters = {**self.defaults, **_checked(spec, self.defaults)}
        for name in self.shares:
            if not 0.0 <= values[name] <= 1.0:
                raise BadSpec(f"optimizer {spec.name!r}: {name} must lie from 0 to 1, got {values[name]}")
        for name in self.below_one:
            if np.float32(values[name]) == 1:
                raise BadSpec(
                    f"optimizer {spec.name!r}: {name} must be below 1 in float32, got {values[name]}: every row would "
                    "be NaN"
                )
        self.default_learning_rate = values["learning_rate"]
        self._singles = {name: np.float32(value) for name, value in values.items()}
        self._decay = self._singles["weight_decay"]

    def scalars(self, step: int, rate: F) -> Scalars:
        """What the kernel takes besides learning rate and weight decay.

        Args:
            step: Optimizer steps taken before this one.
            rate: Its learning rate.
        """
        return ()

    def single(self, *names: str) -> tuple[F, ...]:
        """Hyperparameters, rounded to float32."""
        return tuple(map(self._singles.__getitem__, names))

    def in_double(self, *names: str) -> tuple[float, ...]:
        """Hyperparameters, rounded to float32, in double: what `DenseForm` holds."""
        return tuple(map(float, self.single(*names)))

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        rate = np.float32(batch.rate)
        scalars = rate, self._decay, self.scalars(batch.step, rate)
        self.kernel(weights.shape[1], (*batch.arrays(weights, slots), *scalars))


def _kept(beta: float) -> float:
    """What is left of a moment after `m += (0 - m) * (1 - beta)`, with 1 - beta in float32 as in Keras."""
    return 1.0 - float(np.float32(1 - beta))


def hyperparameters(**values: float) -> Mapping[str, float]:
    """An optimizer's hyperparameters with their defaults."""
    return MappingProxyType(values)


def _checked(spec: OptimizerSpec, defaults: Mapping[str, float]) -> dict[str, float]:
    """The hyperparameters that a spec names."""
    named = dict(spec.hyperparameters)
    for name, value in named.items():
        if name not in defaults:
            raise BadSpec(
                f"optimizer {spec.name!r}: unknown hyperparameter {name!r} (known: {', '.join(sorted(defaults))})"
            )
        if not abs(value) <= _FLOAT32_MAX:  # NaN is not, either
            raise BadSpec(f"optimizer {spec.name!r}: {name} must be finite in float32, got {value}")
    return named


def float32_power(base: float, exponent: int) -> F:
    """float32 `base ** exponent`, base rounded to float32 first, as Keras' `ops.power`.

    Taken in double precision and rounded once: float32 library powers differ
    between machines, and `1 - beta_2 ** t` magnifies their last bit.
    """
    return np.float32(float(np.float32(base)) ** exponent)


def adam_rate(beta_1: float, beta_2: float, step: int, rate: F) -> F:
    """float32 `rate sqrt(1 - beta_2^t) / (1 - beta_1^t)`, t = step + 1: the learning rate, corrected for bias."""
    powers = float32_power(beta_1, step + 1), float32_power(beta_2, step + 1)
    corrected: F = rate * np.sqrt(_ONE - powers[1]) / (_ONE - powers[0])
    return corrected


def _adadelta_step(w: F, g: F, square: F, change: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    rho, share, epsilon = scalars
    a = rho * square + share * (g * g)
    d = -(np.sqrt(change + epsilon) * g / np.sqrt(a + epsilon))
    return w + rate * d, a, rho * change + share * (d * d)


class Adadelta(KernelOptimizer):
    """`a = rho a + (1 - rho) g²; d = -sqrt(b + e) g / sqrt(a + e); b = rho b + (1 - rho) d²; w += lr d`."""

    defaults = hyperparameters(learning_rate=0.001, rho=0.95, epsilon=1e-7, weight_decay=0.0)
    shares = ("rho",)
    slots = (SlotSpec("accumulated_grad", squares=True), SlotSpec("accumulated_delta_var", squares=True))
    kernel = staticmethod(update_kernel(_adadelta_step, 2))

    def scalars(self, step: int, rate: F) -> Scalars:
        rho, epsilon = self.single("rho", "epsilon")
        return rho, np.float32(1 - self.hyperparameters["rho"]), epsilon

    def without_gradient(self) -> DenseForm:
        rho, decay = self.in_double("rho", "weight_decay")
        return DenseForm((rho, rho), decay=decay)


def _adagrad_step(w: F, g: F, square: F, rate: F, scalars: Scalars) -> tuple[F, F]:
    a = square + g * g
    return w - rate * g / np.sqrt(a + scalars[0]), a


class Adagrad(KernelOptimizer):
    """`a += g²; w -= lr g / sqrt(a + epsilon)`."""

    defaults = hyperparameters(learning_rate=0.001, initial_accumulator_value=0.1, epsilon=1e-7, weight_decay=0.0)
    kernel = staticmethod(update_kernel(_adagrad_step, 1, twice=True))

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots = (SlotSpec("accumulator", self.hyperparameters["initial_accumulator_value"], squares=True),)

    def scalars(self, step: int, rate: F) -> Scalars:
        return self.single("epsilon")

    def without_gradient(self) -> DenseForm:
        return DenseForm((1.0,), decay=float(self._decay))


def adam_step(w: F, g: F, m: F, v: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    """Adam's step on one value: new weight, momentum and velocity."""
    alpha, share_1, share_2, epsilon = scalars
    m = m + (g - m) * share_1
    v = v + (g * g - v) * share_2
    return w - m * alpha / (np.sqrt(v) + epsilon), m, v


def _amsgrad_step(w: F, g: F, m: F, v: F, peak: F, rate: F, scalars: Scalars) -> tuple[F, F, F, F]:
    alpha, share_1, share_2, epsilon = scalars
    m = m + (g - m) * share_1
    v = v + (g * g - v) * share_2
    peak = peak if peak > v else v  # v also where it is no number, as in Keras
    return w - m * alpha / (np.sqrt(peak) + epsilon), m, v, peak


_ADAM = update_kernel(adam_step, 2, twice=True)
_AMSGRAD = update_kernel(_amsgrad_step, 3)


class Adam(KernelOptimizer):
    """`m += (g - m)(1 - b1); v += (g² - v)(1 - b2); w -= m alpha / (sqrt(v) + epsilon)`.

    `alpha = lr sqrt(1 - b2^t) / (1 - b1^t)`, t = step + 1. AMSGrad divides by the largest v seen.
    """

    defaults = hyperparameters(
        learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, amsgrad=0.0, weight_decay=0.0
    )
    shares = ("beta_1", "beta_2")
    below_one = ("beta_1",)

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        amsgrad = bool(self.hyperparameters["amsgrad"])
        names = ("momentum", "velocity", "velocity_hat") if amsgrad else ("momentum", "velocity")
        self.slots = tuple(SlotSpec(name, squares=name != "momentum") for name in names)
        self.kernel = _AMSGRAD if amsgrad else _ADAM

    def scalars(self, step: int, rate: F) -> Scalars:
        """alpha, 1 - beta_1, 1 - beta_2 and epsilon."""
        beta_1, beta_2 = self.hyperparameters["beta_1"], self.hyperparameters["beta_2"]
        # 1 - beta is rounded to float32 after the subtraction, as in Keras.
        shares = np.float32(1 - beta_1), np.float32(1 - beta_2)
        return adam_rate(beta_1, beta_2, step, rate), *shares, *self.single("epsilon")

    def without_gradient(self) -> DenseForm:
        beta_1, beta_2 = self.hyperparameters["beta_1"], self.hyperparameters["beta_2"]
        epsilon, decay = self.in_double("epsilon", "weight_decay")
        factors = (_kept(beta_1), _kept(beta_2), 1.0)[: len(self.slots)]

        def scale(step: int, rate: float) -> float:
            return -float(adam_rate(beta_1, beta_2, step, np.float32(rate)))

        return DenseForm(factors, 0, scale, len(factors) - 1, True, epsilon, decay)


class AdamW(Adam):
    """Adam with weight decay by default."""

    defaults = hyperparameters(**{**Adam.defaults, "weight_decay": 0.004})


def _adamax_step(w: F, g: F, m: F, norm: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    share_1, beta_2, correction, epsilon = scalars
    m = m + (g - m) * share_1
    norm = max(beta_2 * norm, abs(g))
    return w - rate * m / (correction * (norm + epsilon)), m, norm


class Adamax(KernelOptimizer):
    """`m += (g - m)(1 - b1); u = max(b2 u, |g|); w -= lr m / ((1 - b1^t)(u + epsilon))`."""

    defaults = hyperparameters(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, weight_decay=0.0)
    shares = ("beta_1", "beta_2")
    below_one = ("beta_1",)
    slots = (SlotSpec("momentum"), SlotSpec("norm", squares=True))
    kernel = staticmethod(update_kernel(_adamax_step, 2))

    def scalars(self, step: int, rate: F) -> Scalars:
        beta_1, (beta_2, epsilon) = self.hyperparameters["beta_1"], self.single("beta_2", "epsilon")
        return np.float32(1 - beta_1), beta_2, np.float32(1) - float32_power(beta_1, step + 1), epsilon

    def without_gradient(self) -> DenseForm:
        beta_1 = self.hyperparameters["beta_1"]
        beta_2, epsilon, decay = self.in_double("beta_2", "epsilon", "weight_decay")

        def scale(step: int, rate: float) -> float:
            return -float(np.float32(rate)) / float(np.float32(1) - float32_power(beta_1, step + 1))

        return DenseForm((_kept(beta_1), beta_2), 0, scale, 1, False, epsilon, decay)


@inlined
def _regularised(w: F, g: F, linear: F, grown: F, before: F, rate: F, scalars: Scalars) -> tuple[F, F]:
    """New weight and linear term; `grown` and `before` are powers of the accumulator after and before the step."""
    l1, l2_twice, shrinkage_twice = scalars
    linear = linear + ((g + shrinkage_twice * w) - (grown - before) / rate * w)
    clipped = min(max(linear, -l1), l1)
    return (clipped - linear) / (grown / rate + l2_twice), linear


def _ftrl_root_step(w: F, g: F, square: F, linear: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    """The usual power of -1/2: a root, which IEEE fixes to the bit."""
    grown = square + g * g
    weight, linear = _regularised(w, g, linear, np.sqrt(grown), np.sqrt(square), rate, scalars)
    return weight, grown, linear


def _ftrl_power_step(w: F, g: F, square: F, linear: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    grown, power = square + g * g, scalars[3]
    # In double and rounded once: float32 library powers differ between machines.
    after, before = np.float32(np.float64(grown) ** power), np.float32(np.float64(square) ** power)
    weight, linear = _regularised(w, g, linear, after, before, rate, scalars[:3])
    return weight, grown, linear


_FTRL_ROOT, _FTRL_POWER = update_kernel(_ftrl_root_step, 2), update_kernel(_ftrl_power_step, 2)


class Ftrl(KernelOptimizer):
    """Keras' Ftrl; slots are the accumulator of squared gradients and the linear term."""

    defaults = hyperparameters(
        learning_rate=0.001,
        learning_rate_power=-0.5,
        initial_accumulator_value=0.1,
        l1_regularization_strength=0.0,
        l2_regularization_strength=0.0,
        l2_shrinkage_regularization_strength=0.0,
        beta=0.0,
        weight_decay=0.0,
    )

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        accumulator, power = (
            self.hyperparameters[name] for name in ("initial_accumulator_value", "learning_rate_power")
        )
        if accumulator < 0:
            raise BadSpec(f"optimizer 'ftrl': initial_accumulator_value {accumulator} is below 0")
        if power > 0:
            raise BadSpec(f"optimizer 'ftrl': learning_rate_power {power} is above 0")
        self.slots = (SlotSpec("accumulator", accumulator, squares=True), SlotSpec("linear"))
        self._power = -power
        self.kernel = _FTRL_ROOT if self._power == 0.5 else _FTRL_POWER

    def scalars(self, step: int, rate: F) -> Scalars:
        l1, l2, beta = self.single("l1_regularization_strength", "l2_regularization_strength", "beta")
        shrinkage_twice = np.float32(2 * self.hyperparameters["l2_shrinkage_regularization_strength"])
        found = l1, np.float32(2) * (l2 + beta / (np.float32(2) * rate)), shrinkage_twice
        return found if self._power == 0.5 else (*found, self._power)


def _lion_step(w: F, g: F, m: F, rate: F, scalars: Scalars) -> tuple[F, F]:
    beta_1, share_1, beta_2, share_2 = scalars
    # np.sign keeps 0 and NaN as they are.
    return w - rate * np.sign(m * beta_1 + g * share_1), m * beta_2 + g * share_2


class Lion(KernelOptimizer):
    """`w -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g`."""

    defaults = hyperparameters(learning_rate=0.001, beta_1=0.9, beta_2=0.99, weight_decay=0.0)
    shares = ("beta_1", "beta_2")
    slots = (SlotSpec("momentum"),)
    kernel = staticmethod(update_kernel(_lion_step, 1))

    def scalars(self, step: int, rate: F) -> Scalars:
        (beta_1, beta_2), one = self.single("beta_1", "beta_2"), np.float32(1)
        return beta_1, one - beta_1, beta_2, one - beta_2


def _nadam_step(w: F, g: F, m: F, v: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    share_1, share_2, u_next, correction_next, share_now, correction_now, correction_2, epsilon = scalars
    m = m + (g - m) * share_1
    v = v + (g * g - v) * share_2
    m_hat = u_next * m / correction_next + share_now * g / correction_now
    return w - m_hat * rate / (np.sqrt(v / correction_2) + epsilon), m, v


class Nadam(KernelOptimizer):
    """Adam with Nesterov momentum and the momentum schedule of Dozat (2016).

    Keras keeps the running product of the schedule in a variable; here it is
    computed anew from the step, so the optimizer holds no state.
    """

    defaults = hyperparameters(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, weight_decay=0.0)
    shares = ("beta_1", "beta_2")
    below_one = ("beta_2",)
    slots = (SlotSpec("momentum"), SlotSpec("velocity", squares=True))
    kernel = staticmethod(update_kernel(_nadam_step, 2))

    def scalars(self, step: int, rate: F) -> Scalars:
        beta_1, beta_2 = self.hyperparameters["beta_1"], self.hyperparameters["beta_2"]
        u, u_next = _schedule(beta_1, step + 1), _schedule(beta_1, step + 2)
        product = _momentum_product(beta_1, step + 1)
        return (
            _ONE - np.float32(beta_1),
            _ONE - np.float32(beta_2),
            u_next,
            _ONE - product * u_next,
            _ONE - u,
            _ONE - product,
            _ONE - float32_power(beta_2, step + 1),
            *self.single("epsilon"),
        )


def _schedule(beta_1: float, step: int) -> F:
    """float32 momentum of step t, counted from 1: `beta_1 (1 - 0.96^t / 2)`."""
    return np.float32(beta_1) * (_ONE - np.float32(0.5) * float32_power(0.96, step))


@lru_cache(maxsize=64)
def _momentum_product(beta_1: float, steps: int) -> F:
    """The product of the momenta of steps 1 to `steps`, folded in float32 as Keras folds it."""
    beta, product, step = np.float32(beta_1), _ONE, 1
    while step <= steps and (decay := _ONE - np.float32(0.5) * float32_power(0.96, step)) < 1:
        product, step = product * beta * decay, step + 1
    return np.float32(_folded(product, beta, steps + 1 - step))


@kernel
def _folded(product: F, factor: F, times: int) -> F:
    """product * factor * factor * ..., until that changes nothing: a job takes millions of steps."""
    for _ in range(times):
        before, product = product, product * factor
        if product == before:
            break
    return product


# A kernel each: with the cases as branches in the loop over columns, LLVM does not vectorise it.


def _rmsprop_plain_step(w: F, g: F, v: F, rate: F, scalars: Scalars) -> tuple[F, F]:
    rho, share, epsilon, _ = scalars
    v = rho * v + share * (g * g)
    return w - rate * g / np.sqrt(v + epsilon), v


def _rmsprop_momentum_step(w: F, g: F, v: F, change: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    rho, share, epsilon, momentum = scalars
    v = rho * v + share * (g * g)
    change = momentum * change + rate * g / np.sqrt(v + epsilon)
    return w - change, v, change


def _rmsprop_centered_step(w: F, g: F, v: F, mean: F, rate: F, scalars: Scalars) -> tuple[F, F, F]:
    rho, share, epsilon, _ = scalars
    v = rho * v + share * (g * g)
    mean = rho * mean + share * g
    return w - rate * g / np.sqrt(v - mean * mean + epsilon), v, mean


def _rmsprop_centered_momentum_step(
    w: F, g: F, v: F, change: F, mean: F, rate: F, scalars: Scalars
) -> tuple[F, F, F, F]:
    rho, share, epsilon, momentum = scalars
    v = rho * v + share * (g * g)
    mean = rho * mean + share * g
    change = momentum * change + rate * g / np.sqrt(v - mean * mean + epsilon)
    return w - change, v, change, mean


_RMSPROP = {  # by whether there is momentum, and whether it is centered
    (False, False): update_kernel(_rmsprop_plain_step, 1),
    (False, True): update_kernel(_rmsprop_centered_step, 2),
    (True, False): update_kernel(_rmsprop_momentum_step, 2),
    (True, True): update_kernel(_rmsprop_centered_momentum_step, 3),
}


class RMSprop(KernelOptimizer):
    """`v = rho v + (1 - rho) g²; w -= lr g / sqrt(v + epsilon)`.

    Centered subtracts the square of the averaged gradient from v; momentum averages the steps.
    """

    defaults = hyperparameters(learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-7, centered=0.0, weight_decay=0.0)
    shares = ("rho", "momentum")

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        momentum, centered = self.hyperparameters["momentum"] > 0, bool(self.hyperparameters["centered"])
        names = ["velocity"] + ["momentum"] * momentum + ["average_gradient"] * centered
        self.slots = tuple(SlotSpec(name, squares=name == "velocity") for name in names)
        self.kernel = _RMSPROP[momentum, centered]

    def scalars(self, step: int, rate: F) -> Scalars:
        rho, epsilon, momentum = self.single("rho", "epsilon", "momentum")
        return rho, np.float32(1 - self.hyperparameters["rho"]), epsilon, momentum

    def without_gradient(self) -> DenseForm:
        rho, momentum, decay = self.in_double("rho", "momentum", "weight_decay")
        centered = (rho,) if self.hyperparameters["centered"] else ()
        if not momentum:
            return DenseForm((rho, *centered), decay=decay)
        return DenseForm((rho, momentum, *centered), 1, lambda step, rate: -1.0, decay=decay)


_LANES = 16
_NO_SQUARES = np.empty(0, F)


class RowwiseAdagrad(KernelOptimizer):
    """`a += mean(g²); w -= lr / (sqrt(a) + epsilon) g`, a being one value a row."""

    cross_column = True
    # Those of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen(optimizer=EXACT_ROWWISE_ADAGRAD), which TorchRec's
    # fused row-wise Adagrad runs; Keras has none.
    defaults = hyperparameters(learning_rate=0.01, initial_accumulator_value=0.0, epsilon=1e-8, weight_decay=0.0)

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots = (
            SlotSpec("accumulator", self.hyperparameters["initial_accumulator_value"], columns=1, squares=True),
        )

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        means = _NO_SQUARES if batch.squares is None else batch.squares
        scalars = np.float32(batch.rate), *self.single("weight_decay", "epsilon")
        _rowwise_adagrad(*batch.arrays(weights, slots), means, scalars)

    def without_gradient(self) -> DenseForm:
        return DenseForm((), decay=float(self._decay))


def row_squares(gradients: Float32) -> Float32:
    """The mean of each row's squares, float32 `[u]`, to the bit as `RowwiseAdagrad` takes it.

    For `TableUpdate.row_squares`, where the columns of a row lie in several places.

    Args:
        gradients: float32 `[u, dim]`, C-contiguous, of whole rows.
    """
    squares = np.empty(len(gradients), F)
    _row_squares(gradients, squares)
    return squares


@kernel
def _mean_of_squares(gradients: Float32, row: int) -> F:
    """Of one row: in 16 sums, joined pairwise, then what is left over of 16 values, one by one.

    This order is a separate one, so that the processor may add 16 numbers at once.
    """
    dim = gradients.shape[1]
    total = lane_squares(gradients, row, dim // _LANES)
    for j in range(dim - dim % _LANES, dim):
        total += gradients[row, j] * gradients[row, j]
    mean: F = total / np.float32(dim)
    return mean


@kernel
def _row_squares(gradients: Float32, squares: Float32) -> None:
    for i in range(len(gradients)):
        squares[i] = _mean_of_squares(gradients, i)


@kernel
def _rowwise_adagrad(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    squares: Float32,
    scalars: Scalars,
) -> None:
    count, dim = gradients.shape
    rate, decay, epsilon = scalars
    far = prefetch_distance(dim)
    for i in range(count):
        ahead = min(i + far, count - 1)
        prefetch(weights, places[ahead])
        prefetch(slots, positions[ahead])
        g = gradients[i]
        square = squares[i] if len(squares) else _mean_of_squares(gradients, i)
        a = slots[positions[i], 0] + square
        slots[positions[i], 0] = a
        scale = rate / (np.sqrt(a) + epsilon)
        w = weights[places[i]]
        for j in range(dim):
            x = w[j] - w[j] * decay * rate
            w[j] = x - scale * g[j]


def _sgd_plain_step(w: F, g: F, rate: F, scalars: Scalars) -> tuple[F]:
    return (w - g * rate,)


def _sgd_momentum_step(w: F, g: F, m: F, rate: F, scalars: Scalars) -> tuple[F, F]:
    m = m * scalars[0] - g * rate
    return w + m, m


def _sgd_nesterov_step(w: F, g: F, m: F, rate: F, scalars: Scalars) -> tuple[F, F]:
    m = m * scalars[0] - g * rate
    return w + (m * scalars[0] - g * rate), m


_SGD_PLAIN, _SGD_MOMENTUM, _SGD_NESTEROV = (
    update_kernel(step, slots)
    for step, slots in ((_sgd_plain_step, 0), (_sgd_momentum_step, 1), (_sgd_nesterov_step, 1))
)


class SGD(KernelOptimizer):
    """`w -= lr g`; with momentum `m = mu m - lr g; w += m` (Nesterov: `w += mu m - lr g`)."""

    defaults = hyperparameters(learning_rate=0.01, momentum=0.0, nesterov=0.0, weight_decay=0.0)
    shares = ("momentum",)

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots, self.kernel = (), _SGD_PLAIN
        if self.hyperparameters["momentum"]:
            self.slots = (SlotSpec("momentum"),)
            self.kernel = _SGD_NESTEROV if self.hyperparameters["nesterov"] else _SGD_MOMENTUM

    def scalars(self, step: int, rate: F) -> Scalars:
        return self.single("momentum")

    def without_gradient(self) -> DenseForm:
        momentum, decay = self.in_double("momentum", "weight_decay")
        if not momentum:
            return DenseForm((), decay=decay)
        share = momentum if self.hyperparameters["nesterov"] else 1.0
        return DenseForm((momentum,), 0, lambda step, rate: share, decay=decay)


FUSED: Mapping[str, type[KernelOptimizer]] = {
    "adadelta": Adadelta,
    "adagrad": Adagrad,
    "adam": Adam,
    "adamax": Adamax,
    "adamw": AdamW,
    "ftrl": Ftrl,
    "lion": Lion,
    "nadam": Nadam,
    "rmsprop": RMSprop,
    "rowwise_adagrad": RowwiseAdagrad,
    "sgd": SGD,
}
"""By name. A class has the name and the hyperparameters of Keras' optimizer, where Keras has it."""
