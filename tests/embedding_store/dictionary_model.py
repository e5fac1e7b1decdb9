"""Embedding tables as dictionaries: what any store must be equal to, written without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.contracts.reference_optimizers import Row, adagrad_row, adam_row, sgd_row

StepRow = Callable[[np.ndarray, "np.ndarray | None", np.ndarray, int, np.float32], Row]


def rowwise_adagrad_row(
    weights: np.ndarray, slots: np.ndarray | None, gradient: np.ndarray, step: int, rate: np.float32
) -> Row:
    """One accumulator a row. Exact for gradients whose squares add up without rounding."""
    before = np.float32(0) if slots is None else slots[0]
    accumulator = before + np.sum(gradient * gradient, dtype=np.float32) / np.float32(len(gradient))
    scale = rate / (np.sqrt(accumulator) + np.float32(1e-8))
    return weights - scale * gradient, np.array([accumulator], np.float32)


STEPS: dict[str, StepRow] = {
    "sgd": sgd_row,
    "adagrad": adagrad_row,
    "adam": adam_row,
    "rowwise_adagrad": rowwise_adagrad_row,
}


@dataclass
class ModelTable:
    """A table: id -> (weights, slots), for ids that hold a value of their own.

    Attributes:
        initial: id -> the row that it reads before it is updated.
        optimizer: Of `STEPS`.
        rate: Its learning rate.
        admitted_at: Which sighting of an id admits it.
        max_age: Versions without a touch that a row survives; None: any number.
        min_frequency: Touches from one look to the next that a row needs; None: none.
        every: Versions from one look to the next.
        ttl_ms: Milliseconds without a touch that a row survives; None: any number.
    """

    initial: Callable[[int], np.ndarray]
    optimizer: str
    rate: float
    admitted_at: int = 1
    max_age: int | None = None
    min_frequency: int | None = None
    every: int = 1
    ttl_ms: int | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    sighted: dict[int, int] = field(default_factory=dict)
    touched: dict[int, int] = field(default_factory=dict)
    touches: dict[int, int] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)

    def read(self, one: int) -> np.ndarray:
        """The row that an id reads."""
        return self.rows[one][0] if one in self.rows else self.initial(one)

    def commit(self, version: int, pairs: list[tuple[int, np.ndarray]], step: int) -> None:
        """Gradients of any ids, duplicates among them, in the order in which they are summed."""
        sums: dict[int, np.ndarray] = {}
        for one, gradient in pairs:
            sums[one] = sums[one] + gradient if one in sums else gradient
        for one, total in sums.items():
            if one not in self.rows and self.admitted_at > 1:
                self.sighted[one] = self.sighted.get(one, 0) + 1
                if self.sighted[one] < self.admitted_at:
                    continue
            weights, slots = self.rows.get(one, (self.initial(one), None))
            self.rows[one] = STEPS[self.optimizer](weights, slots, total, step, np.float32(self.rate))
            self.touched[one] = version
            self.touches[one] = self.touches.get(one, 0) + 1

    def evict(self, version: int, now_ms: int = 0) -> None:
        """The end of every commit, also of those without gradients for this table; `now_ms`: its time."""
        self.times[version] = now_ms
        if version % self.every:
            return
        for one in list(self.rows):
            old = self.max_age is not None and version - self.touched[one] > self.max_age
            rare = self.min_frequency is not None and self.touches.get(one, 0) < self.min_frequency
            past = self.ttl_ms is not None and now_ms - self.times[self.touched[one]] > self.ttl_ms
            if old or rare or past:
                self.delete(one)
        self.touches.clear()

    def delete(self, one: int) -> None:
        """The id reads its initial value again."""
        self.rows.pop(one, None)
        self.touched.pop(one, None)
        self.touches.pop(one, None)

    def clear(self) -> None:
        """All ids do."""
        self.rows.clear()
        self.touched.clear()
        self.touches.clear()
        self.sighted.clear()
