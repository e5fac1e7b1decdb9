"""Embedding tables as dictionaries: what any store must be equal to, written without it."""

from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store import RowBlock, TableSpec, initial_rows
from tests.contracts.reference_rows import row_step

Row = tuple[np.ndarray, np.ndarray]
_NEXT = 2**62


@dataclass
class ModelTable:
    """A table: id -> (weights, slots), for ids that hold a value of their own."""

    spec: TableSpec  # what it is
    rows: dict[int, Row] = field(default_factory=dict)
    sighted: dict[int, int] = field(default_factory=dict)
    touched: dict[int, int] = field(default_factory=dict)
    touches: dict[int, int] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)

    def read(self, one: int) -> np.ndarray:
        return self.row(one)[0]

    def row(self, one: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Its weights and slots; no slots: it was never updated."""
        return self.rows.get(one) or (initial_rows(self.spec, np.array([one], np.int64))[0], None)

    def bytes_by_id(self) -> dict[int, tuple[bytes, bytes]]:
        return {one: (weights.tobytes(), slots.tobytes()) for one, (weights, slots) in self.rows.items()}

    def commit(self, version: int, pairs: list[tuple[int, np.ndarray]], step: int, rate: float | None = None) -> None:
        """Gradients of any ids, duplicates among them, in the order in which they are summed."""
        sums: dict[int, np.ndarray] = {}
        for one, gradient in pairs:
            sums[one] = sums[one] + gradient if one in sums else gradient
        for one, total in sums.items():
            if one not in self.rows and self.spec.admission is not None:
                self.sighted[one] = self.sighted.get(one, 0) + 1
                if self.sighted[one] < self.spec.admission.sightings:
                    continue
            self.rows[one] = row_step(self.spec.optimizer, rate)(*self.row(one), total, step)
            self.touched[one] = version
            self.touches[one] = self.touches.get(one, 0) + 1

    def put(self, block: RowBlock) -> None:
        """Rows without touches count as touched, once, at the version that comes next."""
        for at, one in enumerate(block.ids.tolist()):
            self.rows[one] = block.weights[at], block.slots[at]
            touched, times = (_NEXT, 1) if block.touches is None else block.touches[at].tolist()
            self.touched[one], self.touches[one] = touched, times

    def evict(self, version: int, now_ms: int = 0) -> None:
        """The end of every commit, also of those without gradients for this table; `now_ms`: its time."""
        now_ms = max([now_ms, *self.times.values()])  # a clock that went back stands still
        self.times[version] = now_ms
        self.touched |= {one: version for one, touched in self.touched.items() if touched == _NEXT}
        rule = self.spec.eviction
        if rule is None or version % rule.every:
            return
        for one in list(self.rows):
            old = rule.max_age is not None and version - self.touched[one] > rule.max_age
            rare = rule.min_frequency is not None and self.touches.get(one, 0) < rule.min_frequency
            past = rule.ttl is not None and now_ms - self.times[self.touched[one]] > 1000 * rule.ttl
            if old or rare or past:
                self.delete(one)
        self.touches.clear()

    def delete(self, one: int) -> None:
        self.rows.pop(one, None)
        self.touched.pop(one, None)
        self.touches.pop(one, None)

    def clear(self) -> None:
        self.rows.clear()
        self.touched.clear()
        self.touches.clear()
        self.sighted.clear()
