"""Every log keeps entries whole and in order, as a list would: in files, in Redis, in Valkey, in a Cluster."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput, FutureVersion, StaleVersion, StoreFailed
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.framing import HEADER_BYTES
from elastable.embedding_store.tiers.redis.stream_records import PART_BYTES
from tests.embedding_store.log.log_places import KINDS, Entry, open_log, read

_BYTES = np.random.default_rng(0).bytes(4 << 20)
SIZES = (0, 1, 47, 5_000, 70_000, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 << 20)


@pytest.fixture(params=KINDS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    begin = tmp_path / "log" if request.param == "files" else f"{request.getfixturevalue(request.param)}?namespace=log"
    return (f"{begin}{number}" for number in itertools.count())


def payload(size: int, number: int) -> bytes:
    begin = number * 7_919 % (len(_BYTES) - size)
    return _BYTES[begin : begin + size]


def fill(log: Log, sizes: tuple[int, ...] = SIZES) -> list[Entry]:
    appended = []
    for sequence, size in enumerate(sizes, log.last + 1):
        content = payload(size, sequence)
        log.append(sequence, sequence // 2, [content[:7], memoryview(content)[7:60_000], bytearray(content[60_000:])])
        appended.append((sequence, sequence // 2, content))
    return appended


def taken(entries: list[Entry]) -> int:
    return sum(HEADER_BYTES + len(content) for _, _, content in entries)


def test_entries_come_back_whole_and_in_order(places: Iterator[str]) -> None:
    address = next(places)
    with open_log(address) as log:
        assert (log.first, log.last, log.bytes, read(log)) == (1, 0, 0, [])
        appended = fill(log)
        assert (log.first, log.last, log.bytes) == (1, len(SIZES), taken(appended))
        assert read(log) == appended
        log.sync()
    with open_log(address) as log:
        assert (log.first, log.last, log.bytes) == (1, len(SIZES), taken(appended))
        for count in range(len(appended) + 2):
            assert read(log, after=count) == appended[count:]
        appended += fill(log)
        log.sync()
        assert read(log) == appended


def test_a_payload_of_many_small_pieces_is_joined(places: Iterator[str]) -> None:
    pieces = [payload(number % 5, number) for number in range(5_000)]
    with open_log(next(places)) as log:
        log.append(1, 1, pieces)
        log.append(2, 1, [np.arange(1_000, dtype=np.int64).data, np.ones((3, 4), np.float32).data])
        first, second = read(log)
    assert first[2] == b"".join(pieces)
    assert second[2] == np.arange(1_000).tobytes() + np.ones((3, 4), np.float32).tobytes()


def test_an_entry_that_is_not_the_next_one_is_refused(places: Iterator[str]) -> None:
    with open_log(next(places)) as log:
        log.append(1, 0, [b"one"])
        with pytest.raises(StaleVersion, match="entry 1 cannot be appended, the next one is 2"):
            log.append(1, 0, [b"x"])
        with pytest.raises(FutureVersion, match="entry 3 cannot be appended, the next one is 2"):
            log.append(3, 1, [b"x"])
        assert read(log) == [(1, 0, b"one")]


def test_asking_for_trimmed_entries_is_an_error(places: Iterator[str]) -> None:
    with open_log(next(places)) as log:
        appended = fill(log)
        log.trim(4)
        with pytest.raises(BadInput, match="begins with entry 4: those after 2 were trimmed"):
            read(log, after=2)
        with pytest.raises(BadInput, match="begins with entry 4: it cannot be truncated after entry 2"):
            log.truncate(2)
        assert log.last == len(appended)
        log.trim(100)
        assert read(log, after=len(appended) - 1) == appended[-1:], "the newest one knows where the next begins"


def test_a_closed_log_refuses_everything(places: Iterator[str]) -> None:
    log = open_log(next(places))
    log.append(1, 1, [b"x"])
    log.close()
    log.close()
    for call in (lambda: log.append(2, 2, [b""]), log.sync, lambda: log.trim(1), lambda: log.truncate(0)):
        with pytest.raises(StoreFailed, match="closed"):
            call()


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(SIZES)),
        st.tuples(st.just("append"), st.integers(0, 2_000)),
        st.tuples(st.sampled_from(("trim", "truncate")), st.integers(0, 12)),
        st.tuples(st.just("open again"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_any_history_is_that_of_a_list(places: Iterator[str], steps: list[tuple[str, int]]) -> None:
    address = next(places)
    log, kept = open_log(address), list[Entry]()
    first, numbers = 1, itertools.count()
    try:
        for step, value in steps:
            if step == "append":
                following, content = log.last + 1, payload(value, next(numbers))
                log.append(following, 3 * following, [content])
                kept.append((following, 3 * following, content))
            elif step == "trim":
                log.trim(value)
                through = max(first, min(value, log.last))
                kept, first = [entry for entry in kept if entry[0] >= through], through
            elif step == "truncate" and (value >= first or first == 1):
                log.truncate(value)
                kept = [entry for entry in kept if entry[0] <= value]
            elif step == "truncate":
                with pytest.raises(BadInput, match="cannot be truncated"):
                    log.truncate(value)
            else:
                log.close()
                log = open_log(address)
            assert (log.first, log.last) == (first, kept[-1][0] if kept else 0)
            assert log.bytes == taken(kept)
            assert read(log, after=first - 1) == kept
    finally:
        log.close()
