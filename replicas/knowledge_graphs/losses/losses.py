"""Losses of triples against candidates: log-sigmoid, margin ranking, softmax; with their gradients.

A loss sees scores alone, so every score function goes with every loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.losses.loss_kernels import log_sigmoid_rows, margin_ranking_rows, softmax_rows

__all__ = ["LOSSES", "LogSigmoid", "Loss", "LossValue", "MarginRanking", "SampledSoftmax", "loss_function"]

_PAIRS_A_THREAD = 8192


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss and its gradients.

    Attributes:
        total: The weighted sum over the triples.
        positive: float32 `[b]`, gradients of the triples' scores.
        negative: float32 `[b, n]`, of their candidates'; 0 where one does not count.
    """

    total: float
    positive: Float32
    negative: Float32


class Loss:
    """A loss of each triple, from its score and those of its candidates.

    Args:
        rows: The kernel that computes weighted losses and gradients of some triples.
        scalars: What it takes besides arrays.
    """

    name: str

    def __init__(self, rows: Callable[..., None], *scalars: float) -> None:
        self._rows, self._scalars = rows, tuple(np.float32(scalar) for scalar in scalars)

    def __call__(
        self,
        positive: Float32,
        negative: Float32,
        weight: Float32,
        counted: Bools | None = None,
        pool: RangePool = SERIAL,
    ) -> LossValue:
        """The weighted sum of the triples' losses.

        Args:
            positive: float32 `[b]`, scores of the triples.
            negative: float32 `[b, n]`, scores of their candidates.
            weight: float32 `[b]`.
            counted: bool `[b, n]`: which candidates count; None: all.
            pool: Threads to compute with; they change no bit.
        """
        losses, to_positive = np.empty(len(positive), np.float32), np.empty(len(positive), np.float32)
        to_negative = np.empty_like(negative)
        mask = np.empty((0, 0), np.bool_) if counted is None else counted
        more = self._row_arrays(negative, counted)
        arguments = positive, negative, weight, mask, *more, *self._scalars, losses, to_positive, to_negative
        fewest = max(1, _PAIRS_A_THREAD // max(1, negative.shape[1]))
        pool.run(lambda start, stop: self._rows(*arguments, start, stop), len(positive), fewest)
        return LossValue(float(np.sum(losses, dtype=np.float64)), to_positive, to_negative)

    def _row_arrays(self, negative: Float32, counted: Bools | None) -> tuple[Float32, ...]:
        """Further arrays of the kernel, a value or row for each triple."""
        return ()


class LogSigmoid(Loss):
    """`-(log s(margin + p) + sum w log s(-margin - n)) / 2`, s the sigmoid (Sun et al., 2019).

    Args:
        margin: Above 0 for scores that are minus a distance; 0 for dot products.
        adversarial: Weights w are the softmax of `adversarial * n`, taken as
            constants (self-adversarial sampling); 0: all are equal.
    """

    name = "log-sigmoid"

    def __init__(self, margin: float = 0.0, adversarial: float = 0.0) -> None:
        super().__init__(log_sigmoid_rows, margin, adversarial)


class MarginRanking(Loss):
    """`sum w max(0, margin - p + n)`; weights w as in `LogSigmoid`."""

    name = "margin"

    def __init__(self, margin: float = 1.0, adversarial: float = 0.0) -> None:
        super().__init__(margin_ranking_rows, margin, adversarial)


class SampledSoftmax(Loss):
    """`-log(exp(p) / (exp(p) + c sum exp(n)))`: cross-entropy of the triple among its candidates.

    Args:
        margin: Not used.
        adversarial: Not used.
        entities: c is `(entities - 1) / candidates that count`, so that the sum
            estimates the one over all entities; 0: c is 1.
    """

    name = "softmax"

    def __init__(self, margin: float = 0.0, adversarial: float = 0.0, entities: int = 0) -> None:
        super().__init__(softmax_rows, entities - 1)

    def _row_arrays(self, negative: Float32, counted: Bools | None) -> tuple[Float32, ...]:
        there = negative if counted is None else np.where(counted, negative, np.float32(-np.inf))
        return (there.max(axis=1, initial=np.float32(-np.inf)),)


LOSSES: Mapping[str, Callable[[float, float], Loss]] = MappingProxyType(
    {maker.name: maker for maker in (LogSigmoid, MarginRanking, SampledSoftmax)}
)
"""Losses by name."""


def loss_function(name: str, margin: float, adversarial: float) -> Loss:
    """A loss by its name. Raises BadInput where there is none; names those there are."""
    if name not in LOSSES:
        raise BadInput(f"loss {name!r}: known are {', '.join(LOSSES)}")
    return LOSSES[name](margin, adversarial)
