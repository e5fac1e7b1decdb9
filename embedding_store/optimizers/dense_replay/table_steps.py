"""The steps that one table has taken, as far back as some row has not followed them."""

import math
import threading
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64, UInt8
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.native.intrinsics import stores_in_order
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.optimizers.base import DenseForm
from elastable.embedding_store.optimizers.dense_replay.replay_kernels import OF_STEPS, missing_rows
from elastable.embedding_store.optimizers.dense_replay.steps_at import StepsAt

_MOST = 1 << 17  # steps that are remembered: with coefficients, sums and rates some MiB
_MOST_BYTES = 1 << 26  # of coefficients, where a step takes many
_REPLAY_EPOCHS = 4  # that as many steps make, where nothing else ends one
_HEAD = 3  # numbers before the steps of a saved replay epoch


class TableSteps:
    """Counts the steps of a table from 1, and remembers what they were, in replay epochs.

    A row that is behind is brought to the end of each replay epoch in turn, rounded to float32 there, and from the last
    end to the present: as if it had been written to a checkpoint and restored whenever a replay epoch ended. A replay
    epoch ends where a commit says so, and by itself after a quarter of `most` steps.

    Rows may be read and caught up by many threads at once, with what `at` gives; whatever counts, forgets or restores
    steps is done by one alone. Every number is a function of the steps taken and of where replay epochs ended, and of
    nothing else, such as who read what when.

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
        self._replay_epochs: list[ReplayEpoch] = []
        self._ends: tuple[StepsAt, ...] = ()
        self.begin_anew()

    @property
    def first(self) -> int:
        """The oldest step that is remembered."""
        return self._replay_epochs[0].first

    @property
    def now(self) -> int:
        """The steps taken: a row is caught up when it is caught up to this one."""
        return self._replay_epochs[-1].now

    @property
    def replay_epoch(self) -> int:
        """The step at which the newest replay epoch begins."""
        return self._replay_epochs[-1].first

    @property
    def replay_epochs(self) -> int:
        """How many are remembered."""
        return len(self._replay_epochs)

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
        self._replay_epochs[-1].reserve()
        if self.form.decay * float(np.float32(rate)) >= 1 or self.form.decay * rate >= 1:
            raise BadInput(
                f"table {self._table!r}: weight_decay {self.form.decay:g} times learning rate {rate:g} is not below 1, "
                "and lazy=False has no dense form for that"
            )

    def take(self, step: int, rate: float, ends_replay_epoch: bool = False) -> None:
        """Counts one step, whatever rows it touched.

        Args:
            step: Optimizer steps taken before it (Keras' `iterations`).
            rate: Its learning rate.
            ends_replay_epoch: As of `Commit`.
        """
        newest = self._replay_epochs[-1]
        with np.errstate(all="ignore"):
            newest.take(step, rate)
        if ends_replay_epoch or _REPLAY_EPOCHS * newest.count >= self.most:
            self._begin_replay_epoch()
        self._begin_view()

    def end_replay_epoch(self) -> None:
        """The present step ends its replay epoch, and none is taken: the table was frozen since."""
        if self._replay_epochs[-1].count:
            self._begin_replay_epoch()
            self._begin_view()

    def forget(self, before: int) -> None:
        """Drops the replay epochs that end by step `before`, which no row is behind."""
        gone = sum(replay_epoch.now <= before for replay_epoch in self._replay_epochs[:-1])
        if gone:
            self._replay_epochs, self._ends = self._replay_epochs[gone:], self._ends[gone:]
            self._begin_view()

    def begin_anew(self) -> None:
        """All rows are forgotten, and all steps with them."""
        self._replay_epochs, self._ends = [ReplayEpoch(self._terms, 1)], ()
        self._begin_view()

    def at(self, step: int | None = None) -> StepsAt:
        """Rows as of a step that is remembered (None: the last one)."""
        if step is None or step == self.now:
            return self._view
        with self._lock:
            if step not in self._past:
                if len(self._past) > 3:
                    self._past.clear()
                replay_epoch = self._replay_epoch_of(step)
                self._past[step] = self._replay_epochs[replay_epoch].at(step, self._ends[:replay_epoch])
            return self._past[step]

    def untouched(self, step: int | None = None) -> float:
        """The logarithm of the factor by which decay shrank rows that were never updated, until a step (None: now)."""
        wanted = self.now if step is None else step
        return self._replay_epochs[self._replay_epoch_of(wanted)].untouched(wanted)

    def put_untouched(self, logarithm: float) -> None:
        """As `untouched` gave it."""
        self._replay_epochs[-1].put_untouched(logarithm)
        self._begin_view()

    def save(self) -> bytes:
        """All that is remembered."""
        return np.concatenate([replay_epoch.save() for replay_epoch in self._replay_epochs]).astype("<f8").tobytes()

    def restore(self, saved: bytes) -> None:
        """As `save` gave it. Raises `StoreFailed` for what it cannot have given."""
        values: Float64 = np.frombuffer(saved, "<f8").astype(np.float64) if len(saved) % 8 == 0 else np.empty(0)
        values = values if np.isfinite(values).all() else values[:0]
        replay_epochs: list[ReplayEpoch] = []
        while len(values) or not replay_epochs:
            first, count = (int(value) for value in values[:2]) if len(values) >= _HEAD else (0, 0)
            expected = replay_epochs[-1].now if replay_epochs else max(first, 1)
            if first != expected or count < 0 or len(values) < _HEAD + 3 * count:
                raise StoreFailed(f"the steps of table {self._table!r} are not what was saved")
            replay_epochs.append(ReplayEpoch(self._terms, first, float(values[2])))
            replay_epochs[-1].restore(values[_HEAD : _HEAD + 3 * count])
            values = values[_HEAD + 3 * count :]
        for replay_epoch in replay_epochs[:-1]:
            replay_epoch.end()
        self._replay_epochs, self._ends = (
            replay_epochs,
            tuple(replay_epoch.present(()) for replay_epoch in replay_epochs[:-1]),
        )
        self._begin_view()

    def _replay_epoch_of(self, step: int) -> int:
        """The number, among those that are remembered, of the newest replay epoch that has begun at a step."""
        return bisect_right(self._replay_epochs, step, key=lambda replay_epoch: replay_epoch.first) - 1

    def _begin_replay_epoch(self) -> None:
        newest = self._replay_epochs[-1]
        newest.end()
        self._ends = (*self._ends, newest.present(()))
        # What a checkpoint of now keeps of it, and what a table has that was restored from that.
        self._replay_epochs.append(ReplayEpoch(self._terms, newest.now, 0.0 - newest.untouched()))

    def _begin_view(self) -> None:
        self._past.clear()
        self._view = self._replay_epochs[-1].present(self._ends)


# Steps without a gradient between two versions at which every row counts as caught up: what they do to a row


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


class ReplayEpoch:
    """Some steps, one after the other. Views of it may be used by many threads; one alone counts steps.

    Attributes:
        first: The table's step at which the replay epoch begins: rows that are caught up to it, or a later one, are its
            own.
        count: Steps since.
        untouched_since: What `untouched` leaves out: the logarithm of what decay has made of any weight since the
            replay epoch began, until rows that were never updated had their initial values. Where they had them before
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
            before: The ends of the replay epochs before this one, the oldest first.
        """
        return self._view(self.count, self._room, before)

    def at(self, step: int, before: tuple[StepsAt, ...]) -> StepsAt:
        """Rows as of any step of the replay epoch, in room of their own; `before` as of `present`."""
        return self._view(step - self.first, self._new_room(step - self.first), before)

    def save(self) -> Float64:
        """All that there is, float64 `[3 + 3 count]`: `first`, `count` and `untouched_since` first."""
        head, count = np.array([self.first, self.count, self.untouched_since]), self.count
        return np.concatenate((head, self._scales[:count], self._gains[:count], self._logs[1 : count + 1]))

    def restore(self, steps: Float64) -> None:
        """Takes the steps that `save` gave, float64 `[3 count]`, to a replay epoch that has none."""
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
                steps = self._logs, terms.ratios, cut, wanted, count
                write_coefficients(sums[0], *steps, view.coefficients, view.known)

        return StepsAt(terms.form, terms.segments.degree, self.first, self.first + count, kept, room, fill, before)

    def _sums_until(self, count: int) -> Float64:
        """Power sums of the first `count` steps, float64 `[degree + 1, steps + 1]`.

        Steps are summed in blocks as long as any of them matters: the sums of a block end with the block after it, or
        with `count`. So they are the same whenever they are taken.
        """
        block = self._terms.segments.reach
        arrays = (self._scales, self._gains, self._terms.ratios)
        while self._summed + 2 * block <= self.count:
            power_sums(*arrays, self._sums, self._summed, self._summed + 2 * block)
            self._summed += block
        sums = self._sums if count == self.count else self._sums.copy()
        power_sums(*arrays, sums, max(count // block - 1, 0) * block, count)
        return sums


# The scalars that catch a row up, by the step up to which it has been: computed once for all rows of that step


@kernel
def power_sums(scales: Float64, gains: Float64, ratios: Float64, sums: Float64, oldest: int, end: int) -> None:
    """Writes `sums[i, c]`, P_i of step c, for the steps `oldest` to `end`, as if no step came after these.

    Args:
        scales: float64 `[steps]`, s_t.
        gains: float64 `[steps]`, 1 / e_t.
        ratios: float64 `[degree + 1]`, q_i.
        sums: float64 `[degree + 1, steps + 1]`.
        oldest: The first step whose sum is wanted.
        end: The steps taken; there is nothing to sum from here on.
    """
    for i in range(len(ratios)):
        total = 0.0
        sums[i, end] = total
        for c in range(end - 1, oldest - 1, -1):
            total = ratios[i] * gains[c] * (scales[c] + total)
            sums[i, c] = total


@kernel
def _moments(
    sums: Float64, logs: Float64, ratios: Float64, c: int, begin: int, end: int, centre: float, out: Float64
) -> None:
    """The moments of steps c + begin to c + end - 1 around a centre, into `out` float64 `[degree + 1]`."""
    shrink = ratios[1] / ratios[0] if len(ratios) > 1 else 1.0
    before = np.exp(logs[c] - logs[c + begin]) * ratios[0] ** begin
    after = np.exp(logs[c] - logs[c + end]) * ratios[0] ** end
    first, last = shrink**begin / centre, shrink**end / centre
    for i in range(len(ratios)):
        out[i] = before * sums[i, c + begin] - after * sums[i, c + end]
        before, after = before * first, after * last
    for j in range(1, len(ratios)):  # differences of neighbours, j times over: sums of (r^k / c - 1)^j
        for i in range(len(ratios) - 1, j - 1, -1):
            out[i] -= out[i - 1]


_Cut = tuple[Float64, Int64, Float64]
"""`Terms.factors`, and starts and centres as of `Segments`."""


@kernel
def write_coefficients(
    sums: Float64, logs: Float64, ratios: Float64, cut: _Cut, wanted: Int64, at: int, out: Float32, known: UInt8
) -> None:
    """Writes what rows caught up to the steps `wanted` need to be caught up to step `at`.

    A row of `out` holds what the weights are multiplied by, what each slot is
    multiplied by, and for each segment its centre and its coefficients.

    Args:
        sums, ratios: As of `power_sums`, `at` being the last step.
        logs: float64 `[steps + 1]`: the logarithm of e_0 ... e_(t - 1).
        cut: Factors of slots, and starts and centres of segments.
        wanted: int64 `[n]`, steps below `at`.
        at: The step to replay up to.
        out: float32 `[rows, columns]`: row `OF_STEPS + c` is of step c.
        known: uint8 `[rows]`, set once a row is written, for whoever reads meanwhile.
    """
    factors, starts, centres = cut
    moments = np.empty(len(ratios), np.float64)
    for w in range(len(wanted)):
        c = wanted[w]
        row, missed = out[c + OF_STEPS], at - c
        kept = np.exp(logs[at] - logs[c])
        row[0] = kept
        for k in range(len(factors)):
            row[1 + k] = factors[k] ** missed
        column = 1 + len(factors)
        for s in range(len(starts)):
            begin = min(starts[s], missed)
            end = min(starts[s + 1], missed) if s + 1 < len(starts) else missed
            row[column] = centres[s]
            _moments(sums, logs, ratios, c, begin, end, centres[s], moments)
            for j in range(len(ratios)):
                row[column + 1 + j] = kept * moments[j]
            column += 1 + len(ratios)
    stores_in_order()
    for w in range(len(wanted)):
        known[wanted[w] + OF_STEPS] = 1


# How the sum over missed steps is cut, so that a short polynomial replaces each piece. Pure planning


_TOLERANCE = 2e-8  # of the whole sum, that cutting the series may cost: below float32's half unit of 6e-8
_NEGLIGIBLE = 1e-12  # of the whole sum, that the steps beyond `reach` may add
_NEGLIGIBLE_SHARE = 1e-9  # of epsilon
_LARGEST_ROOT = 1e3  # of divisors, where their ratio to epsilon decides how long steps matter
_DEGREES = (0, 3, 7)


@dataclass(frozen=True, slots=True)
class Segments:
    """The pieces of a sum over missed steps.

    Attributes:
        starts: int64 `[s]`: segment i holds the steps k with starts[i] < k <= starts[i + 1], the last one all others.
        centres: float64 `[s]`: c of each.
        degree: Of the polynomials, one of 0, 3, 7.
        reach: Steps after which nothing moves any more.
    """

    starts: npt.NDArray[np.int64]
    centres: Float64
    degree: int
    reach: int


def segments_of(form: DenseForm) -> Segments:
    """The cheapest pieces that are exact enough for an optimizer's dense form."""
    if form.moving < 0:
        return _segments(0.0, 1.0, 1.0)
    return _segments(form.factors[form.moving], form.shrink, form.epsilon)


@lru_cache(maxsize=64)
def _segments(b: float, r: float, epsilon: float) -> Segments:
    reach = _reach(b, r, epsilon)
    if r == 1 or b == 0:
        return Segments(np.zeros(1, np.int64), np.ones(1), 0, reach)
    # From there on epsilon alone divides, whatever the divisor was: all these steps are one piece.
    floor = math.log(_NEGLIGIBLE_SHARE * epsilon / _LARGEST_ROOT) / math.log(r)
    steps: Float64 = np.arange(1.0, min(reach, math.ceil(floor)) + 1)
    sizes: Float64 = np.exp(
        np.minimum(math.log(b / r), 0.0) * (steps - 1)
    )  # of the steps, at most; the first one's is 1
    plans = [Segments(*_cut(sizes, np.power(r, steps), degree), degree, reach) for degree in _DEGREES[1:]]
    return min(plans, key=lambda plan: len(plan.starts) * (plan.degree + 10))  # a division and a root weigh as much


def _reach(b: float, r: float, epsilon: float) -> int:
    """Steps after which the others add less than what counts, whatever the divisor."""
    if b == 0:
        return 1
    lean = b / r
    # Either the steps get smaller even where epsilon does not matter, or epsilon bounds them in the end.
    bounds = [math.log(_NEGLIGIBLE * (1 - lean)) / math.log(lean)] if lean < 1 else []
    if epsilon > 0:
        bounds.append(math.log(_NEGLIGIBLE * (1 - b) * epsilon / _LARGEST_ROOT) / math.log(b))
    return 1 + math.ceil(min(bounds))


def _cut(sizes: Float64, powers: Float64, degree: int) -> tuple[npt.NDArray[np.int64], Float64]:
    """Starts and centres: each segment as long as its series may be cut after `degree`."""
    sums = np.cumsum(sizes)
    starts, centres, begin = [], [], 0
    while begin < len(sizes):
        low, high = begin + 1, len(sizes)
        while low < high:  # the longest that is good enough
            end = (low + high + 1) // 2
            segment = slice(begin, end)
            good = _error(sizes[segment], powers[segment], sums[segment], degree) <= _TOLERANCE
            low, high = (end, high) if good else (low, end - 1)
        starts.append(begin)
        centres.append(_centre(sizes[begin:low], powers[begin:low]))
        begin = low
    return np.array(starts, np.int64), np.array(centres)


def _centre(sizes: Float64, powers: Float64) -> float:
    return float(np.average(powers, weights=sizes))


def _error(sizes: Float64, powers: Float64, sums: Float64, degree: int) -> float:
    """What cutting a segment's series costs at most, wherever the sum ends, as a share of it."""
    away = np.abs(powers / _centre(sizes, powers) - 1.0)
    return float(np.max(np.cumsum(sizes * away ** (degree + 1)) / sums))
