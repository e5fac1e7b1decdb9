"""The steps that one table has taken, as far back as some row has not followed them."""

from __future__ import annotations

import math
import threading

import numpy as np

from embedding_store.catch_up.coefficients import Bytes, power_sums, write_coefficients
from embedding_store.catch_up.dense_form import DenseForm
from embedding_store.catch_up.kernels import OF_STEPS, missing_rows
from embedding_store.catch_up.segments import segments_of
from embedding_store.catch_up.steps_at import StepsAt
from embedding_store.errors import BadInput, StoreFailed
from embedding_store.store import Float32, Int64

__all__ = ["TableSteps"]

_FEWEST = 1 << 10  # steps that there is room for at first
_MOST = 1 << 17  # steps that are remembered: with coefficients, sums and rates some MiB
_MOST_BYTES = 1 << 26  # of coefficients, where a step takes many


class TableSteps:
    """Counts the steps of a table from 1, and remembers what they were.

    Rows may be read and caught up by many threads at once, with what `at`
    gives; whatever counts, forgets or restores steps is done by one alone.
    Every number is a function of the steps taken and of nothing else, such as
    who read what when.

    Attributes:
        form: What a step does to a row without a gradient.
        first: The oldest step that is remembered.
        now: The steps taken: a row is caught up when it is caught up to this one.
        most: Steps that are remembered at most, so that no row may fall further behind.
    """

    def __init__(self, table: str, form: DenseForm, most: int | None = None) -> None:
        """`table` names the table in messages; `most` is for tests."""
        self.form = form
        self.first = self.now = 1
        self._table = table
        segments = self._segments = segments_of(form)
        ratio = form.factors[form.moving] if form.moving >= 0 else 0.0
        self._ratios = ratio * form.shrink ** np.arange(segments.degree + 1.0)
        self._factors = np.array(form.factors, np.float64)
        self._columns = 1 + len(self._factors) + len(segments.starts) * (1 + len(self._ratios))
        self.most = most or max(1 << 12, min(_MOST, _MOST_BYTES // (4 * self._columns)))
        self._lock = threading.Lock()
        self._untouched_since = 0.0
        self._scales, self._gains, self._logs = np.zeros(0), np.zeros(0), np.zeros(1)
        self._past: dict[int, StepsAt] = {}
        self._make_room(_FEWEST)
        self._begin_view()

    def require_rate(self, rate: float) -> None:
        """Raises `BadInput` for a learning rate at which weight decay turns weights around."""
        if self.form.decay * rate >= 1:
            raise BadInput(
                f"table {self._table!r}: weight_decay {self.form.decay:g} times learning rate {rate:g} is not below 1, "
                "and lazy=False has no dense form for that"
            )

    def take(self, step: int, rate: float) -> None:
        """Counts one step, whatever rows it touched.

        Args:
            step: Optimizer steps taken before it (Keras' `iterations`).
            rate: Its learning rate.
        """
        at = self.now - self.first
        if at == len(self._scales):
            self._make_room(2 * at)
        kept = 1.0 - self.form.decay * float(np.float32(rate))
        self._scales[at], self._gains[at] = self.form.scale(step, rate), 1.0 / kept
        self._logs[at + 1] = self._logs[at] + math.log(kept)
        self.now += 1
        self._begin_view()

    def forget(self, before: int) -> None:
        """Is told that no row is behind step `before`."""
        gone = before - self.first
        if gone <= 0:
            return
        self._scales, self._gains, self._logs = self._scales[gone:], self._gains[gone:], self._logs[gone:]
        self.first = before
        self._make_room(max(_FEWEST, len(self._scales)))
        self._begin_view()

    def begin_anew(self) -> None:
        """All rows are forgotten: each is what it is at first, from now on."""
        self._untouched_since = self._log(self.now)
        self._begin_view()

    def at(self, step: int | None = None) -> StepsAt:
        """Rows as of a step that is remembered (None: the last one)."""
        if step is None or step == self.now:
            return self._view
        with self._lock:
            if step not in self._past:
                if len(self._past) > 3:
                    self._past.clear()
                self._past[step] = self._new_view(step, self._room())
            return self._past[step]

    def untouched(self, step: int | None = None) -> bytes:
        """What decay has made of rows that were never updated, until a step that is remembered (None: the last one).

        The logarithm, a little-endian float64.
        """
        return np.array(self._log(self.now if step is None else step) - self._untouched_since, "<f8").tobytes()

    def put_untouched(self, saved: bytes) -> None:
        """As `untouched` gave it."""
        self._untouched_since = self._log(self.now) - float(np.frombuffer(saved, "<f8")[0])
        self._begin_view()

    def save(self) -> bytes:
        """All that is remembered."""
        count = self.now - self.first
        head = np.array([self.first, self.now, self._untouched_since])
        parts = (head, self._scales[:count], self._gains[:count], self._logs[: count + 1])
        return np.concatenate(parts).astype("<f8").tobytes()

    def restore(self, saved: bytes) -> None:
        """As `save` gave it. Raises `StoreFailed` for what it cannot have given."""
        values = np.frombuffer(saved, "<f8").astype(np.float64) if len(saved) % 8 == 0 else np.empty(0)
        count = (len(values) - 4) // 3
        if count < 0 or len(values) != 4 + 3 * count or values[1] - values[0] != count:
            raise StoreFailed(f"the steps of table {self._table!r} are not what was saved")
        self.first, self.now, self._untouched_since = int(values[0]), int(values[1]), float(values[2])
        self._scales, self._gains, self._logs = np.split(values[3:], [count, 2 * count])
        self._make_room(max(_FEWEST, count))
        self._begin_view()

    def _log(self, step: int) -> float:
        """The logarithm of what weight decay has made of any weight until a step."""
        return float(self._logs[step - self.first])

    def _room(self) -> tuple[Float32, Bytes]:
        rows = len(self._scales) + OF_STEPS + 1
        return np.zeros((rows, self._columns), np.float32), np.zeros(rows, np.uint8)

    def _make_room(self, steps: int) -> None:
        """For at least so many steps, with those that there are."""
        held, more = len(self._scales), max(0, steps - len(self._scales))
        self._scales, self._gains = (np.append(array, np.zeros(more)) for array in (self._scales, self._gains))
        self._logs = np.append(self._logs[: held + 1], np.zeros(more))
        self._sums = np.zeros((len(self._ratios), held + more + 1))
        self._summed, self._for_now = self.first, self._room()

    def _begin_view(self) -> None:
        self._past.clear()
        self._view = self._new_view(self.now, self._for_now)

    def _new_view(self, step: int, room: tuple[Float32, Bytes]) -> StepsAt:
        kept = math.exp(self._log(step) - self._untouched_since)
        sums: list[np.ndarray] = []

        def fill(view: StepsAt, which: Int64) -> None:
            with self._lock:
                if not sums:
                    sums.append(self._sums_until(step))
                found = np.empty(min(len(which), len(view.known)), np.int64)
                wanted = found[: missing_rows(which, view.known, found)] - OF_STEPS
                cut = (self._factors, self._segments.starts, self._segments.centres)
                given = (self._logs, self._ratios, *cut, wanted, step - self.first)
                write_coefficients(sums[0], *given, view.coefficients, view.known, OF_STEPS)

        return StepsAt(self.form, self._segments.degree, self.first, step, kept, room, fill)

    def _sums_until(self, step: int) -> np.ndarray:
        """Power sums of the steps before `step`, float64 `[degree + 1, steps + 1]`.

        Steps are summed in blocks as long as any of them matters: the sums of a
        block end with the block after it, or with `step`. So they are the same
        whenever they are taken.
        """
        block = self._segments.reach
        arrays = (self._scales, self._gains, self._ratios)
        while (begin := self._summed // block * block) + 2 * block <= self.now:
            stop = begin + block
            power_sums(*arrays, self._sums, max(begin - self.first, 0), stop + block - self.first)
            self._summed = stop
        oldest = max((step // block - 1) * block, self.first)
        sums = self._sums if step == self.now else self._sums.copy()
        power_sums(*arrays, sums, oldest - self.first, step - self.first)
        return sums
