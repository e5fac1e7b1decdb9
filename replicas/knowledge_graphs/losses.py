"""Losses of triples against candidates (log-sigmoid, margin, softmax) and penalties on embeddings, with gradients."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel, summing_kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.scores.functions import Values

_PAIRS_A_THREAD = 8192

Given = tuple[Float32, Float32, Float32, Bools, Float32]
"""Scores of triples `[b]` and of their candidates `[b, n]`; weights `[b]`; which candidates count, `[b, n]` or (all)
`[0, 0]`; the highest score among them, `[b]` (of softmax)."""

Scalars = tuple[np.float32, np.float32]
"""Margin and adversarial; of softmax, the number of other entities."""

Found = tuple[Float32, Float32, Float32]
"""Written: losses `[b]`, and the gradients of both scores."""


class Loss:
    """A loss of each triple, from its score p and those of its candidates n.

    * `log-sigmoid`: `-(log s(margin + p) + sum w log s(-margin - n)) / 2`, s the sigmoid (Sun et al., 2019).
    * `margin`: `sum w max(0, margin - p + n)`.
    * `softmax`: `-log(exp(p) / (exp(p) + c sum exp(n)))`, the cross-entropy of the triple among its candidates.

    Args:
        name: One of `LOSSES`.
        margin: Above 0 for scores that are minus a distance; 0 for dot products. Not of `softmax`.
        adversarial: Weights w are the softmax of `adversarial * n`, taken as
            constants (self-adversarial sampling); 0: all are equal. Not of `softmax`.
        entities: Of `softmax`: c is `(entities - 1) / candidates that count`, so that the sum
            estimates the one over all entities; 0: c is 1.

    Raises:
        BadInput: there is no such loss; names those there are.
    """

    def __init__(self, name: str, margin: float = 0.0, adversarial: float = 0.0, entities: int = 0) -> None:
        if name not in LOSSES:
            raise BadInput(f"loss {name!r}: known are {', '.join(LOSSES)}")
        self.name, self._rows = name, LOSSES[name]
        scalars = (entities - 1, 0) if name == SOFTMAX else (margin, adversarial)
        self._scalars: Scalars = np.float32(scalars[0]), np.float32(scalars[1])

    def __call__(
        self,
        positive: Float32,
        negative: Float32,
        weight: Float32,
        counted: Bools | None = None,
        pool: RangePool = SERIAL,
    ) -> tuple[float, Float32, Float32]:
        """The weighted sum of the triples' losses.

        Args:
            positive: float32 `[b]`, scores of the triples.
            negative: float32 `[b, n]`, scores of their candidates.
            weight: float32 `[b]`.
            counted: bool `[b, n]`: which candidates count; None: all.
            pool: Threads to compute with; they change no bit.

        Returns:
            The sum; gradients of the triples' scores, float32 `[b]`; those of their candidates', float32 `[b, n]`: 0
            where one does not count.
        """
        found = np.empty(len(positive), np.float32), np.empty(len(positive), np.float32), np.empty_like(negative)
        mask = np.empty((0, 0), np.bool_) if counted is None else counted
        highest = positive
        if self.name == SOFTMAX:
            there = negative if counted is None else np.where(counted, negative, np.float32(-np.inf))
            highest = there.max(axis=1, initial=np.float32(-np.inf))
        given = positive, negative, weight, mask, highest
        fewest = max(1, _PAIRS_A_THREAD // max(1, negative.shape[1]))
        pool.run(lambda start, stop: self._rows(given, self._scalars, found, start, stop), len(positive), fewest)
        return float(np.sum(found[0], dtype=np.float64)), *found[1:]


@kernel
def _counts(counted: Bools, b: int, k: int) -> bool:
    return bool(counted.shape[1] == 0 or counted[b, k])


@kernel
def _weights(negative: Float32, counted: Bools, b: int, adversarial: np.float32, weights: Float32) -> None:
    """Softmax of the candidates that count, or equal shares; 0 where one does not."""
    highest = np.float32(-np.inf)
    for k in range(len(weights)):
        if _counts(counted, b, k):
            highest = max(highest, negative[b, k])
    total = np.float32(0)
    for k in range(len(weights)):
        share = np.float32(0)
        if _counts(counted, b, k):
            share = np.float32(1) if adversarial == 0 else np.exp(adversarial * (negative[b, k] - highest))
        weights[k] = share
        total += share
    if total > 0:
        for k in range(len(weights)):
            weights[k] /= total


@kernel
def _softplus(x: np.float32) -> np.float32:
    return np.float32(max(x, np.float32(0)) + np.log1p(np.exp(-abs(x))))


@kernel
def _sigmoid(x: np.float32) -> np.float32:
    small = np.exp(-abs(x))
    return np.float32((np.float32(1) if x >= 0 else small) / (np.float32(1) + small))


@kernel
def log_sigmoid_rows(given: Given, scalars: Scalars, found: Found, start: int, stop: int) -> None:
    """Weighted loss of triples `start..stop`, with its gradients, written in place."""
    (positive, negative, weight, counted, _), (margin, adversarial) = given, scalars
    losses, to_positive, to_negative = found
    half = np.float32(0.5)
    for b in range(start, stop):
        shares = to_negative[b]
        _weights(negative, counted, b, adversarial, shares)
        total = _softplus(-margin - positive[b])
        to_positive[b] = -half * weight[b] * _sigmoid(-margin - positive[b])
        for k in range(len(shares)):
            share = shares[k]
            if share > 0:
                x = margin + negative[b, k]
                total += share * _softplus(x)
                shares[k] = half * weight[b] * share * _sigmoid(x)
        losses[b] = half * weight[b] * total


@kernel
def margin_ranking_rows(given: Given, scalars: Scalars, found: Found, start: int, stop: int) -> None:
    """Weighted loss of triples `start..stop`, with its gradients, written in place."""
    (positive, negative, weight, counted, _), (margin, adversarial) = given, scalars
    losses, to_positive, to_negative = found
    for b in range(start, stop):
        shares = to_negative[b]
        _weights(negative, counted, b, adversarial, shares)
        total, pull = np.float32(0), np.float32(0)
        for k in range(len(shares)):
            x = margin - positive[b] + negative[b, k]
            share = shares[k] * weight[b]
            shares[k] = share if x > 0 else np.float32(0)
            if x > 0:
                total += share * x
                pull += share
        losses[b], to_positive[b] = total, -pull


@kernel
def softmax_rows(given: Given, scalars: Scalars, found: Found, start: int, stop: int) -> None:
    """Weighted loss of triples `start..stop`, with its gradients, written in place."""
    (positive, negative, weight, counted, highest), (others, _) = given, scalars
    losses, to_positive, to_negative = found
    for b in range(start, stop):
        shares, count, top = to_negative[b], negative.shape[1], max(positive[b], highest[b])
        exponentials(negative[b], top, shares)
        if counted.shape[1]:
            count = 0
            for k in range(len(shares)):
                count += counted[b, k]
                shares[k] = shares[k] if counted[b, k] else np.float32(0)
        each = others / np.float32(count) if others > 0 and count > 0 else np.float32(1)
        mine = np.exp(positive[b] - top)
        total = mine + each * row_total(shares)
        scale = weight[b] / total
        for k in range(len(shares)):
            shares[k] *= scale * each
        to_positive[b] = weight[b] * (mine / total - np.float32(1))
        losses[b] = weight[b] * (np.log(total) + top - positive[b])


SOFTMAX = "softmax"
LOSSES: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"log-sigmoid": log_sigmoid_rows, "margin": margin_ranking_rows, SOFTMAX: softmax_rows}
)
"""By name, the kernel that computes weighted losses and gradients of some triples."""


# Exponentials of rows of scores, eight or sixteen at a time: the C library's function takes one. The polynomial is that
# of the Cephes library (S. L. Moshier), `expf`: its error is below two units in the last place.

_LOWEST = np.float32(-87.0)  # its exponential is the last before denormal numbers
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@kernel
def exponentials(values: Float32, shift: np.float32, out: Float32) -> None:
    """`out[k] = exp(values[k] - shift)`, for values not above `shift`; below e^-87 it is 0. NaN stays NaN."""
    one, half, zero = np.float32(1), np.float32(0.5), np.float32(0)
    for k in range(len(values)):
        x = values[k] - shift
        kept = _LOWEST if x < _LOWEST else x
        power = np.floor(kept * _LOG2_E + half)
        rest = kept - power * _LN2_HIGH
        rest = rest - power * _LN2_LOW
        series = _C0 * rest + _C1
        series = series * rest + _C2
        series = series * rest + _C3
        series = series * rest + _C4
        series = series * rest + _C5
        series = series * (rest * rest) + rest + one
        scale = np.int32((np.int32(power) + 127) << 23).view(np.float32)
        out[k] = zero if x < _LOWEST else series * scale


@summing_kernel
def row_total(values: Float32) -> np.float32:
    """The sum of a row."""
    total = np.float32(0)
    for k in range(len(values)):
        total += values[k]
    return total


REGULARIZERS = ("none", "l2", "n3")
"""By name: nothing; `sum x^2`; `sum |x|^3`, where x is complex with the modulus. Phases are not penalised: as complex
numbers they all have the modulus 1."""


def penalty_gradients(kind: str, rows: Float32, values: Values = "real") -> Float32:
    """float32 `[n, width]`: of the penalties of `rows`, float32 `[n, width]`."""
    if kind == "none" or values == "phase":
        return np.zeros_like(rows)
    if kind == "l2":
        return np.float32(2) * rows
    sizes = _sizes(rows, values)
    if values == "complex":
        sizes = np.concatenate([sizes, sizes], axis=1)
    return np.float32(3) * sizes * rows


def _sizes(rows: Float32, values: Values) -> Float32:
    """Absolute values; of complex numbers, all real parts lie before all imaginary ones."""
    if values == "real":
        return np.abs(rows)
    half = rows.shape[1] // 2
    real, imaginary = rows[:, :half], rows[:, half:]
    return np.asarray(np.sqrt(real * real + imaginary * imaginary), np.float32)
