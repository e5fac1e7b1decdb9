"""Which versions are longer ago than rows may stay: never too many, and after a 1024th of the time all of them."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.engine.eviction import TouchTimes
from elastable.embedding_store.errors import BadInput

PAUSES = st.lists(st.integers(0, 5) | st.integers(0, 3000), min_size=1, max_size=60)


def noted(times: TouchTimes, milliseconds: list[int], first: int = 1) -> None:
    for version, now in enumerate(milliseconds, first):
        times.note(version, now / 1000 + 1e-7)


@given(pauses=PAUSES, ttl_ms=st.integers(1, 1024))
def test_a_short_ttl_is_kept_to_the_millisecond(pauses: list[int], ttl_ms: int) -> None:
    times, clock = TouchTimes("t", ttl_ms / 1000), list(accumulate(pauses))
    noted(times, clock)
    gone = [version for version, now in enumerate(clock, 1) if clock[-1] - now > ttl_ms]
    assert times.oldest == max(gone, default=-1) + 1


@given(pauses=PAUSES, ttl=st.integers(2, 4_000_000))
def test_no_row_goes_too_early_or_much_too_late(pauses: list[int], ttl: int) -> None:
    times, clock = TouchTimes("t", ttl), [1000 * now for now in accumulate(pauses)]
    noted(times, clock)
    ages = [clock[-1] - now for now in clock]
    assert all(age > 1000 * ttl for age in ages[: max(0, times.oldest - 1)])
    assert all(age <= 1000 * ttl * (1 + 1 / 1000) + 1 for age in ages[max(0, times.oldest - 1) :])


def test_it_takes_some_kilobytes_whatever_the_pace() -> None:
    times = TouchTimes("t", 100.0)
    noted(times, list(range(0, 1_000_000, 7)))
    kept = times.read()
    assert kept.nbytes < 25_000
    times.require(kept)


@given(pauses=PAUSES, more=PAUSES, ttl_ms=st.integers(1, 5000))
def test_what_is_kept_goes_on_alike(pauses: list[int], more: list[int], ttl_ms: int) -> None:
    times, again = TouchTimes("t", ttl_ms / 1000), TouchTimes("t", ttl_ms / 1000)
    clock = list(accumulate(pauses))
    noted(times, clock)
    again.require(times.read())
    again.write(times.read())
    for number, now in enumerate(accumulate(more), len(clock) + 1):
        noted(times, [clock[-1] + now], number)
        noted(again, [clock[-1] + now], number)
        assert again.oldest == times.oldest
        np.testing.assert_array_equal(again.read(), times.read())


@given(pauses=PAUSES, back=st.integers(0, 60), ttl_ms=st.integers(1, 5000))
def test_after_a_reset_to_an_earlier_version_its_rows_are_as_old_as_they_were(
    pauses: list[int], back: int, ttl_ms: int
) -> None:
    times, clock = TouchTimes("t", ttl_ms / 1000), list(accumulate(pauses))
    noted(times, clock)
    version = max(1, len(clock) - back)
    later = clock[-1] + 500
    noted(times, [later], version)
    times.require(times.read())
    ages = [later - now for now in clock[: version - 1]]
    assert all(age > ttl_ms for age in ages[: max(0, times.oldest - 1)])
    assert times.read()[-1, 0] == version


@pytest.mark.parametrize(
    "times",
    [
        np.zeros((2, 2), np.int64),
        np.zeros((1, 3), np.float64),
        np.array([[5, 1, 2], [4, 3, 4]]),
        np.array([[4, 1, 2], [5, 1, 4]]),
        np.array([[4, -1, 2]]),
        np.stack([np.arange(5000)] * 3, axis=1),
    ],
)
def test_what_cannot_be_is_refused(times: np.ndarray) -> None:
    with pytest.raises(BadInput, match=r"table 't': touch times must be"):
        TouchTimes("t", 1.0).require(times)
