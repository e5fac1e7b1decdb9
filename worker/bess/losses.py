"""Losses of triples against candidates: log-sigmoid, margin ranking, softmax; with their gradients.

A loss sees scores alone, so every score function goes with every loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from embedding_store.errors import BadInput
from embedding_store.kernel import kernel
from embedding_store.range_pool import SERIAL, RangePool
from worker.bess.batch import Bools, Float32

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


class Loss(ABC):
    """A loss of each triple, from its score and those of its candidates."""

    name: str

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
        pool.run(
            lambda start, stop: self._rows(
                positive, negative, weight, mask, losses, to_positive, to_negative, start, stop
            ),
            len(positive),
            max(1, _PAIRS_A_THREAD // max(1, negative.shape[1])),
        )
        return LossValue(float(np.sum(losses, dtype=np.float64)), to_positive, to_negative)

    @abstractmethod
    def _rows(
        self,
        positive: Float32,
        negative: Float32,
        weight: Float32,
        counted: Bools,
        losses: Float32,
        to_positive: Float32,
        to_negative: Float32,
        start: int,
        stop: int,
    ) -> None:
        """Of the triples `start..stop`: weighted losses and gradients, written in place."""


class LogSigmoid(Loss):
    """`-(log s(margin + p) + sum w log s(-margin - n)) / 2`, s the sigmoid (Sun et al., 2019).

    Args:
        margin: Above 0 for scores that are minus a distance; 0 for dot products.
        adversarial: Weights w are the softmax of `adversarial * n`, taken as
            constants (self-adversarial sampling); 0: all are equal.
    """

    name = "log-sigmoid"

    def __init__(self, margin: float = 0.0, adversarial: float = 0.0) -> None:
        self._margin, self._adversarial = np.float32(margin), np.float32(adversarial)

    def _rows(
        self,
        positive: Float32,
        negative: Float32,
        weight: Float32,
        counted: Bools,
        losses: Float32,
        to_positive: Float32,
        to_negative: Float32,
        start: int,
        stop: int,
    ) -> None:
        _log_sigmoid(
            positive, negative, weight, counted, self._margin, self._adversarial, losses, to_positive, to_negative,
            start, stop,
        )  # fmt: skip


class MarginRanking(Loss):
    """`sum w max(0, margin - p + n)`; weights w as in `LogSigmoid`."""

    name = "margin"

    def __init__(self, margin: float = 1.0, adversarial: float = 0.0) -> None:
        self._margin, self._adversarial = np.float32(margin), np.float32(adversarial)

    def _rows(
        self,
        positive: Float32,
        negative: Float32,
        weight: Float32,
        counted: Bools,
        losses: Float32,
        to_positive: Float32,
        to_negative: Float32,
        start: int,
        stop: int,
    ) -> None:
        _margin_ranking(
            positive, negative, weight, counted, self._margin, self._adversarial, losses, to_positive, to_negative,
            start, stop,
        )  # fmt: skip


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
        self._entities = entities

    def _rows(
        self,
        positive: Float32,
        negative: Float32,
        weight: Float32,
        counted: Bools,
        losses: Float32,
        to_positive: Float32,
        to_negative: Float32,
        start: int,
        stop: int,
    ) -> None:
        _softmax(
            positive, negative, weight, counted, np.float32(self._entities - 1), losses, to_positive, to_negative,
            start, stop,
        )  # fmt: skip


LOSSES: Mapping[str, Callable[[float, float], Loss]] = MappingProxyType(
    {maker.name: maker for maker in (LogSigmoid, MarginRanking, SampledSoftmax)}
)
"""Losses by name."""


def loss_function(name: str, margin: float, adversarial: float) -> Loss:
    """A loss by its name. Raises BadInput where there is none; names those there are."""
    if name not in LOSSES:
        raise BadInput(f"loss {name!r}: known are {', '.join(LOSSES)}")
    return LOSSES[name](margin, adversarial)


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
def _log_sigmoid(
    positive: Float32,
    negative: Float32,
    weight: Float32,
    counted: Bools,
    margin: np.float32,
    adversarial: np.float32,
    losses: Float32,
    to_positive: Float32,
    to_negative: Float32,
    start: int,
    stop: int,
) -> None:
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
def _margin_ranking(
    positive: Float32,
    negative: Float32,
    weight: Float32,
    counted: Bools,
    margin: np.float32,
    adversarial: np.float32,
    losses: Float32,
    to_positive: Float32,
    to_negative: Float32,
    start: int,
    stop: int,
) -> None:
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
def _softmax(
    positive: Float32,
    negative: Float32,
    weight: Float32,
    counted: Bools,
    others: np.float32,
    losses: Float32,
    to_positive: Float32,
    to_negative: Float32,
    start: int,
    stop: int,
) -> None:
    for b in range(start, stop):
        count, highest = 0, positive[b]
        for k in range(negative.shape[1]):
            if _counts(counted, b, k):
                count += 1
                highest = max(highest, negative[b, k])
        each = others / np.float32(count) if others > 0 and count > 0 else np.float32(1)
        mine = np.exp(positive[b] - highest)
        total = mine
        for k in range(negative.shape[1]):
            share = np.float32(0)
            if _counts(counted, b, k):
                share = each * np.exp(negative[b, k] - highest)
            to_negative[b, k] = share
            total += share
        scale = weight[b] / total
        for k in range(negative.shape[1]):
            to_negative[b, k] *= scale
        to_positive[b] = weight[b] * (mine / total - np.float32(1))
        losses[b] = weight[b] * (np.log(total) + highest - positive[b])
