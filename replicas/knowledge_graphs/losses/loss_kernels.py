"""Kernels of the losses: one pass over each triple's candidates, or two."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.losses.exponentials import exponentials, row_total

__all__ = ["log_sigmoid_rows", "margin_ranking_rows", "softmax_rows"]


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
def log_sigmoid_rows(
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
    """Weighted loss of triples `start..stop`, with its gradients, written in place."""
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
def margin_ranking_rows(
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
    """Weighted loss of triples `start..stop`, with its gradients, written in place."""
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
def softmax_rows(
    positive: Float32,
    negative: Float32,
    weight: Float32,
    counted: Bools,
    highest: Float32,
    others: np.float32,
    losses: Float32,
    to_positive: Float32,
    to_negative: Float32,
    start: int,
    stop: int,
) -> None:
    """Weighted loss of triples `start..stop`, with its gradients, written in place."""
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
