"""The steps that one table has taken, as far back as some row has not followed them."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right

import numpy as np

from elastable.embedding_store.contract.arrays import Float64
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.optimizers.dense_replay.chapter import Chapter, Terms
from elastable.embedding_store.optimizers.dense_replay.dense_form import DenseForm
from elastable.embedding_store.optimizers.dense_replay.steps_at import StepsAt

__all__ = ["TableSteps"]

_MOST = 1 << 17  # steps that are remembered: with coefficients, sums and rates some MiB
_MOST_BYTES = 1 << 26  # of coefficients, where a step takes many
_CHAPTERS = 4  # that as many steps make, where nothing else ends one
_HEAD = 3  # numbers before the steps of a saved chapter


class TableSteps:
    """Counts the steps of a table from 1, and remembers what they were, in chapters.

    A row that is behind is brought to the end of each chapter in turn, rounded
    to float32 there, and from the last end to the present: as if it had been
    written to a checkpoint and restored whenever a chapter ended. A chapter ends
    where a commit says so, and by itself after a quarter of `most` steps.

    Rows may be read and caught up by many threads at once, with what `at`
    gives; whatever counts, forgets or restores steps is done by one alone.
    Every number is a function of the steps taken and of where chapters ended,
    and of nothing else, such as who read what when.

    Attributes:
        form: What a step does to a row without a gradient.
        most: Steps that are remembered at most, so that no row may fall further behind.
    """

    def __init__(self, table: str, form: DenseForm, most: int | None = None) -> None:
        """`table` names the table in messages; `most` is for tests."""
        self.form = form
        self._table = table
        self._terms = Terms(form)
        self.most = most or max(1 << 12, min(_MOST, _MOST_BYTES // (4 * self._terms.columns)))
        self._lock = threading.Lock()
        self._past: dict[int, StepsAt] = {}
        self._chapters: list[Chapter] = []
        self._ends: tuple[StepsAt, ...] = ()
        self.begin_anew()

    @property
    def first(self) -> int:
        """The oldest step that is remembered."""
        return self._chapters[0].first

    @property
    def now(self) -> int:
        """The steps taken: a row is caught up when it is caught up to this one."""
        return self._chapters[-1].now

    @property
    def chapter(self) -> int:
        """The step at which the newest chapter begins."""
        return self._chapters[-1].first

    @property
    def chapters(self) -> int:
        """How many are remembered."""
        return len(self._chapters)

    def prepare(self, step: int, rate: float) -> None:
        """Does everything about a step that can fail, and counts none; `take` of the same step cannot fail then.

        Raises:
            BadInput: a learning rate at which weight decay turns weights around, or a step without a finite scale.
            MemoryError: there is no room.
        """
        try:
            with np.errstate(all="ignore"):
                scale = self.form.scale(step, rate)
        except (ArithmeticError, ValueError):
            scale = math.nan
        if not math.isfinite(scale):
            raise BadInput(
                f"table {self._table!r}: with learning rate {rate:g} step {step} moves rows by no finite number, "
                "and lazy=False has no dense form for that"
            )
        self._chapters[-1].reserve()
        if self.form.decay * float(np.float32(rate)) >= 1 or self.form.decay * rate >= 1:
            raise BadInput(
                f"table {self._table!r}: weight_decay {self.form.decay:g} times learning rate {rate:g} is not below 1, "
                "and lazy=False has no dense form for that"
            )

    def take(self, step: int, rate: float, ends_chapter: bool = False) -> None:
        """Counts one step, whatever rows it touched.

        Args:
            step: Optimizer steps taken before it (Keras' `iterations`).
            rate: Its learning rate.
            ends_chapter: As of `Commit`.
        """
        newest = self._chapters[-1]
        with np.errstate(all="ignore"):
            newest.take(step, rate)
        if ends_chapter or _CHAPTERS * newest.count >= self.most:
            self._begin_chapter()
        self._begin_view()

    def end_chapter(self) -> None:
        """The present step ends its chapter, and none is taken: the table was frozen since."""
        if self._chapters[-1].count:
            self._begin_chapter()
            self._begin_view()

    def forget(self, before: int) -> None:
        """Is told that no row is behind step `before`: chapters that end by then are forgotten."""
        gone = sum(chapter.now <= before for chapter in self._chapters[:-1])
        if gone:
            self._chapters, self._ends = self._chapters[gone:], self._ends[gone:]
            self._begin_view()

    def begin_anew(self) -> None:
        """All rows are forgotten, and all steps with them."""
        self._chapters, self._ends = [Chapter(self._terms, 1)], ()
        self._begin_view()

    def at(self, step: int | None = None) -> StepsAt:
        """Rows as of a step that is remembered (None: the last one)."""
        if step is None or step == self.now:
            return self._view
        with self._lock:
            if step not in self._past:
                if len(self._past) > 3:
                    self._past.clear()
                chapter = self._chapter_of(step)
                self._past[step] = self._chapters[chapter].at(step, self._ends[:chapter])
            return self._past[step]

    def untouched(self, step: int | None = None) -> float:
        """The logarithm of the factor by which decay shrank rows that were never updated, until a step (None: now)."""
        wanted = self.now if step is None else step
        return self._chapters[self._chapter_of(wanted)].untouched(wanted)

    def put_untouched(self, logarithm: float) -> None:
        """As `untouched` gave it."""
        self._chapters[-1].put_untouched(logarithm)
        self._begin_view()

    def save(self) -> bytes:
        """All that is remembered."""
        return np.concatenate([chapter.save() for chapter in self._chapters]).astype("<f8").tobytes()

    def restore(self, saved: bytes) -> None:
        """As `save` gave it. Raises `StoreFailed` for what it cannot have given."""
        values: Float64 = np.frombuffer(saved, "<f8").astype(np.float64) if len(saved) % 8 == 0 else np.empty(0)
        values = values if np.isfinite(values).all() else values[:0]
        chapters: list[Chapter] = []
        while len(values) or not chapters:
            first, count = (int(value) for value in values[:2]) if len(values) >= _HEAD else (0, 0)
            expected = chapters[-1].now if chapters else max(first, 1)
            if first != expected or count < 0 or len(values) < _HEAD + 3 * count:
                raise StoreFailed(f"the steps of table {self._table!r} are not what was saved")
            chapters.append(Chapter(self._terms, first, float(values[2])))
            chapters[-1].restore(values[_HEAD : _HEAD + 3 * count])
            values = values[_HEAD + 3 * count :]
        for chapter in chapters[:-1]:
            chapter.end()
        self._chapters, self._ends = chapters, tuple(chapter.present(()) for chapter in chapters[:-1])
        self._begin_view()

    def _chapter_of(self, step: int) -> int:
        """The number, among those that are remembered, of the newest chapter that has begun at a step."""
        return bisect_right(self._chapters, step, key=lambda chapter: chapter.first) - 1

    def _begin_chapter(self) -> None:
        newest = self._chapters[-1]
        newest.end()
        self._ends = (*self._ends, newest.present(()))
        # What a checkpoint of now keeps of it, and what a table has that was restored from that.
        self._chapters.append(Chapter(self._terms, newest.now, 0.0 - newest.untouched()))

    def _begin_view(self) -> None:
        self._past.clear()
        self._view = self._chapters[-1].present(self._ends)
