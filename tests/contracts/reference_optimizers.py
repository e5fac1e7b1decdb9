"""Keras' update rules for one row, written plainly in numpy float32.

Each takes (weights, slots or None for a row never updated, gradient, step,
learning rate) and returns new (weights, slots), slots side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Row = tuple[np.ndarray, np.ndarray]
ONE = np.float32(1)


def sgd_row(weights: np.ndarray, slots: np.ndarray | None, gradient: np.ndarray, step: int, rate: np.float32) -> Row:
    return weights - gradient * rate, np.empty(0, np.float32)


def adagrad_row(
    weights: np.ndarray, slots: np.ndarray | None, gradient: np.ndarray, step: int, rate: np.float32
) -> Row:
    before = np.full_like(weights, 0.1) if slots is None else slots
    accumulator = before + gradient * gradient
    return weights - rate * gradient / np.sqrt(accumulator + np.float32(1e-7)), accumulator


def adam_row(weights: np.ndarray, slots: np.ndarray | None, gradient: np.ndarray, step: int, rate: np.float32) -> Row:
    m, v = np.split(np.zeros(2 * len(weights), np.float32) if slots is None else slots, 2)
    # Powers in double, rounded once: see elastable.embedding_store.optimizers.fused.
    beta_1_power = np.float32(float(np.float32(0.9)) ** (step + 1))
    beta_2_power = np.float32(float(np.float32(0.999)) ** (step + 1))
    alpha = rate * np.sqrt(ONE - beta_2_power) / (ONE - beta_1_power)
    m = m + (gradient - m) * np.float32(1 - 0.9)
    v = v + (gradient * gradient - v) * np.float32(1 - 0.999)
    return weights - m * alpha / (np.sqrt(v) + np.float32(1e-7)), np.concatenate([m, v])


RULES = {"sgd": sgd_row, "adagrad": adagrad_row, "adam": adam_row}


class Reference:
    """A table as a dictionary: gradients folded in the order they come, one step a row."""

    def __init__(self, rule: str, rate: float, initial: Callable[[int], np.ndarray]) -> None:
        self.rows: dict[int, Row] = {}
        self._rule, self._rate, self._initial = RULES[rule], np.float32(rate), initial

    def update(self, ids: Sequence[int], gradients: np.ndarray, step: int) -> None:
        total: dict[int, np.ndarray] = {}
        for one, gradient in zip(ids, gradients, strict=True):
            total[one] = total[one] + gradient if one in total else gradient
        for one, gradient in total.items():
            weights, slots = self.rows.get(one, (self._initial(one), None))
            self.rows[one] = self._rule(weights, slots, gradient, step, self._rate)

    def bytes_by_id(self) -> dict[int, tuple[bytes, bytes]]:
        """As `store_samples.rows_by_id` gives them."""
        return {one: (weights.tobytes(), slots.tobytes()) for one, (weights, slots) in self.rows.items()}
