"""Steps without a gradient between two versions at which every row counts as caught up: what they do to a row.

A chapter reckons as if its first step were the first of all: sums, logarithms
and blocks begin anew with it. So a table that was restored from a checkpoint
of the version at which a chapter begins goes on with the very same numbers as
the table that the checkpoint is of.
"""

from __future__ import annotations

import math
import threading

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64, UInt8
from elastable.embedding_store.optimizers.dense_replay.coefficients import power_sums, write_coefficients
from elastable.embedding_store.optimizers.dense_replay.dense_form import DenseForm
from elastable.embedding_store.optimizers.dense_replay.replay_kernels import OF_STEPS, missing_rows
from elastable.embedding_store.optimizers.dense_replay.segments import segments_of
from elastable.embedding_store.optimizers.dense_replay.steps_at import StepsAt

__all__ = ["Chapter", "Terms"]

_LARGEST = 88.0  # logarithm of a float32
_FEWEST = 1 << 10  # steps that there is room for at first


class Terms:
    """What is the same for all steps of a table.

    Attributes:
        form: What a step does to a row without a gradient.
        segments: How sums over missed steps are cut.
        ratios: float64 `[degree + 1]`, as of `power_sums`.
        factors: float64 `[slots]`.
        columns: Of a row of coefficients.
    """

    def __init__(self, form: DenseForm) -> None:
        self.form = form
        self.segments = segments_of(form)
        ratio = form.factors[form.moving] if form.moving >= 0 else 0.0
        self.ratios = ratio * form.shrink ** np.arange(self.segments.degree + 1.0)
        self.factors = np.array(form.factors, np.float64)
        self.columns = 1 + len(self.factors) + len(self.segments.starts) * (1 + len(self.ratios))


class Chapter:
    """Some steps, one after the other. Views of it may be used by many threads; one alone counts steps.

    Attributes:
        first: The table's step at which the chapter begins: rows that are caught up to it, or a later one, are its own.
        count: Steps since.
        untouched_since: What `untouched` leaves out: the logarithm of what decay has made of any weight since the
            chapter began, until rows that were never updated had their initial values. Where they had them before
            it began, what decay made of them by then, with its sign turned.
    """

    def __init__(self, terms: Terms, first: int, untouched_since: float = 0.0) -> None:
        self.first, self.count, self.untouched_since = first, 0, untouched_since
        self._terms = terms
        self._lock = threading.Lock()
        self._scales, self._gains, self._logs = np.zeros(0), np.zeros(0), np.zeros(1)
        self._make_room(_FEWEST)

    @property
    def now(self) -> int:
        """The table's step that is reached."""
        return self.first + self.count

    def take(self, step: int, rate: float) -> None:
        self.reserve()
        at, form = self.count, self._terms.form
        kept = 1.0 - form.decay * float(np.float32(rate))
        self._scales[at], self._gains[at] = form.scale(step, rate), 1.0 / kept
        self._logs[at + 1] = self._logs[at] + math.log(kept)
        self.count += 1

    def reserve(self) -> None:
        """Makes room for one more step. Raises `MemoryError`."""
        if self.count == len(self._scales):
            self._make_room(2 * self.count)

    def end(self) -> None:
        """No step comes after these: room for more is given back."""
        count = self.count
        self._scales, self._gains = self._scales[:count].copy(), self._gains[:count].copy()
        self._logs = self._logs[: count + 1].copy()
        self._make_room(count)

    def untouched(self, step: int | None = None) -> float:
        """The logarithm of what decay has made of rows that were never updated, until a step (None: the last one)."""
        return float(self._logs[self.count if step is None else step - self.first]) - self.untouched_since

    def put_untouched(self, logarithm: float) -> None:
        """As `untouched` gave it, of the last step."""
        self.untouched_since = float(self._logs[self.count]) - logarithm

    def present(self, before: tuple[StepsAt, ...]) -> StepsAt:
        """Rows as of the last step, in room that the next such view takes over.

        Args:
            before: The ends of the chapters before this one, the oldest first.
        """
        return self._view(self.count, self._room, before)

    def at(self, step: int, before: tuple[StepsAt, ...]) -> StepsAt:
        """Rows as of any step of the chapter, in room of their own; `before` as of `present`."""
        return self._view(step - self.first, self._new_room(step - self.first), before)

    def save(self) -> Float64:
        """All that there is, float64 `[3 + 3 count]`: `first`, `count` and `untouched_since` first."""
        head, count = np.array([self.first, self.count, self.untouched_since]), self.count
        return np.concatenate((head, self._scales[:count], self._gains[:count], self._logs[1 : count + 1]))

    def restore(self, steps: Float64) -> None:
        """Takes the steps that `save` gave, float64 `[3 count]`, to a chapter that has none."""
        self._scales, self._gains, logs = np.split(steps, 3)
        self.count, self._logs = len(logs), np.append(0.0, logs)
        self._make_room(max(_FEWEST, self.count))

    def _new_room(self, steps: int) -> tuple[Float32, UInt8]:
        rows = steps + OF_STEPS + 1
        return np.zeros((rows, self._terms.columns), np.float32), np.zeros(rows, np.uint8)

    def _make_room(self, steps: int) -> None:
        """For at least so many steps, with those that there are."""
        held, more = len(self._scales), max(0, steps - len(self._scales))
        self._scales, self._gains = (np.append(array, np.zeros(more)) for array in (self._scales, self._gains))
        self._logs = np.append(self._logs[: held + 1], np.zeros(more))
        self._sums = np.zeros((len(self._terms.ratios), held + more + 1))
        self._summed, self._room = 0, self._new_room(held + more)

    def _view(self, count: int, room: tuple[Float32, UInt8], before: tuple[StepsAt, ...]) -> StepsAt:
        logarithm = float(self._logs[count]) - self.untouched_since
        kept = math.exp(logarithm) if logarithm <= _LARGEST else math.inf
        terms, sums = self._terms, list[Float64]()

        def fill(view: StepsAt, which: Int64) -> None:
            with self._lock:
                if not sums:
                    sums.append(self._sums_until(count))
                found = np.empty(min(len(which), len(view.known)), np.int64)
                wanted = found[: missing_rows(which, view.known, found)] - OF_STEPS
                cut = (terms.factors, terms.segments.starts, terms.segments.centres)
                given = (self._logs, terms.ratios, *cut, wanted, count)
                write_coefficients(sums[0], *given, view.coefficients, view.known, OF_STEPS)

        return StepsAt(terms.form, terms.segments.degree, self.first, self.first + count, kept, room, fill, before)

    def _sums_until(self, count: int) -> Float64:
        """Power sums of the first `count` steps, float64 `[degree + 1, steps + 1]`.

        Steps are summed in blocks as long as any of them matters: the sums of a
        block end with the block after it, or with `count`. So they are the same
        whenever they are taken.
        """
        block = self._terms.segments.reach
        arrays = (self._scales, self._gains, self._terms.ratios)
        while self._summed + 2 * block <= self.count:
            power_sums(*arrays, self._sums, self._summed, self._summed + 2 * block)
            self._summed += block
        sums = self._sums if count == self.count else self._sums.copy()
        power_sums(*arrays, sums, max(count // block - 1, 0) * block, count)
        return sums
