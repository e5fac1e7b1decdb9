"""Bulk requests are the RESP that hiredis makes; bulk replies survive any cut, and errors stay errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hiredis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.exchange import Replies
from elastable.embedding_store.tiers.redis.record_requests import Keys
from elastable.embedding_store.tiers.redis.resp_codec import COMMAND, NO_STAMP, block_encode_reads, block_encode_writes
from elastable.embedding_store.tiers.redis.resp_replies import ChangeReplies, RowReplies

KEYS = [b"{n:t:0}:weights", b"{n:t:1}:weights", b"k" * 123, b"{n:t:0}:slots", b"{n:t:1}:slots", b"s"]
COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=3)


def commands_of(counts: Sequence[int], width: int, stamped: int = 1, first_key: int = 0) -> np.ndarray:
    commands = np.zeros(len(counts), COMMAND)
    commands["key"] = first_key + np.arange(len(counts))
    commands["rows"] = counts
    commands["row_at"] = np.cumsum(counts) - counts
    commands["width"] = width
    commands["stamped"] = stamped
    return commands


def packed(*words: bytes | str | int) -> bytes:
    return hiredis.pack_command(words)  # type: ignore[arg-type]


def id_bytes(one: int) -> bytes:
    return int(one).to_bytes(8, "little", signed=True)


def bulk(content: bytes | None) -> bytes:
    return b"$-1\r\n" if content is None else b"$%d\r\n%s\r\n" % (len(content), content)


def feed_in_pieces(replies: Replies, stream: bytes, cuts: Sequence[int]) -> None:
    """Feeds as the socket would: what is left over stays, more comes behind it."""
    received = np.frombuffer(stream, np.uint8)
    start = 0
    for stop in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
        start = replies.feed(received, min(start, stop), stop)
    assert start == len(stream)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], np.ndarray, np.ndarray]:
    counts = draw(COUNTS)
    total = sum(counts)
    ids = np.array(draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=total, max_size=total)), np.int64)
    return counts, ids, np.array(draw(st.permutations(range(total))), np.int64)


@given(requests(), st.booleans(), st.integers(0, 1))
def test_reads_are_hmgets(request_: tuple[list[int], np.ndarray, np.ndarray], asking: bool, stamped: int) -> None:
    counts, ids, _ = request_
    commands = commands_of(counts, 8, stamped)
    expected = b""
    for key, command in zip(KEYS, commands, strict=False):
        its = ids[command["row_at"] : command["row_at"] + command["rows"]]
        expected += packed("ASKING") if asking else b""
        expected += packed("HMGET", key, *([b"version"] * stamped), *(id_bytes(one) for one in its))
    assert block_encode_reads(commands, Keys.of(KEYS), ids, asking).tobytes() == expected


@given(requests(), st.booleans(), st.sampled_from([0, 4, 132]), st.sampled_from([NO_STAMP, 0, 2**62]))
def test_writes_are_transactions(
    request_: tuple[list[int], np.ndarray, np.ndarray], asking: bool, slot_width: int, stamp: int
) -> None:
    counts, ids, positions = request_
    total = len(ids)
    weights, slots = commands_of(counts, 12), commands_of(counts, slot_width, 0, 3)
    slots["block_at"] = 12 * total
    block = np.random.default_rng(0).integers(0, 256, (12 + slot_width) * total, np.uint8)
    expected = b""
    for weight, slot in zip(weights, slots, strict=True):
        expected += (packed("ASKING") if asking else b"") + packed("MULTI")
        for command in (weight, slot)[: 2 if slot_width else 1]:
            words = [b"version", id_bytes(stamp)] if command["stamped"] and stamp >= 0 else []
            for row in range(command["row_at"], command["row_at"] + command["rows"]):
                start = command["block_at"] + positions[row] * command["width"]
                words += [id_bytes(ids[row]), block[start : start + command["width"]].tobytes()]
            expected += packed("HSET", KEYS[command["key"]], *words)
        expected += packed("EXEC")
    assert (
        block_encode_writes(weights, slots, Keys.of(KEYS), ids, positions, block, stamp, asking).tobytes() == expected
    )


@given(
    requests(), st.booleans(), st.sampled_from([None, 0, 12_345]), st.lists(st.integers(0, 10_000)), st.integers(1, 9),
    st.data(),
)  # fmt: skip
def test_replies_cut_anywhere(
    request_: tuple[list[int], np.ndarray, np.ndarray],
    asking: bool,
    version: int | None,
    cuts: list[int],
    dim: int,
    data: st.DataObject,
) -> None:
    counts, ids, positions = request_
    total, width = len(ids), 4 * dim
    rows = np.random.default_rng(1).integers(0, 256, (total, width), np.uint8)
    gone = np.array(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)), bool)
    stream = b"" if version is None else (b"+OK\r\n" if asking else b"") + bulk(b"%d" % version)
    for c, count in enumerate(counts):
        stream += (b"+OK\r\n" if asking else b"") + b"*%d\r\n" % (count + 1) + bulk(None if c == 2 else id_bytes(c))
        for row in range(sum(counts[:c]), sum(counts[: c + 1])):
            stream += bulk(None if gone[row] else rows[row].tobytes())
    block, missing = np.zeros(total * width, np.uint8), np.full(total, 7, np.uint8)
    replies = RowReplies(
        commands_of(counts, width), positions, block, missing, questions=version is not None, asking=asking
    )
    feed_in_pieces(replies, stream, cuts)
    assert replies.done
    assert replies.failures == {}
    assert replies.answers == ([] if version is None else [b"%d" % version])
    assert replies.stamps.tolist() == [0, 1, NO_STAMP][: len(counts)]
    np.testing.assert_array_equal(missing[positions], gone)
    np.testing.assert_array_equal(block.reshape(total, width)[positions][~gone], rows[~gone])
    assert not block.reshape(total, width)[positions][gone].any()


@pytest.mark.parametrize("width", [4, 8, 96, 100, 1_000, 9_996, 10_000, 99_996, 100_000, 262_144])
def test_rows_of_any_length_there_and_back(width: int) -> None:
    ids, positions = np.array([7, -8, 9]), np.array([2, 0, 1])
    block = np.random.default_rng(2).integers(0, 256, 3 * width, np.uint8)
    commands, slots = commands_of([3], width, 0), commands_of([3], 0, 0, 3)
    rows = [block[width * position : width * (position + 1)].tobytes() for position in positions]
    words = [word for one, row in zip(ids, rows, strict=True) for word in (id_bytes(one), row)]
    sent = block_encode_writes(commands, slots, Keys.of(KEYS), ids, positions, block).tobytes()
    assert sent == packed("MULTI") + packed("HSET", KEYS[0], *words) + packed("EXEC")
    back, missing = np.zeros(3 * width, np.uint8), np.full(3, 7, np.uint8)
    replies = RowReplies(commands, positions, back, missing)
    stream = b"*3\r\n" + bulk(rows[0]) + bulk(None) + bulk(rows[2])
    feed_in_pieces(replies, stream, [5, width, 2 * width])
    assert replies.done
    assert (replies.completed, missing.tolist()) == (1, [1, 0, 0])
    back[:width] = block[:width]
    np.testing.assert_array_equal(back, block)


def row_replies(counts: Sequence[int], **options: Any) -> RowReplies:
    total = sum(counts)
    block, missing = np.zeros(4 * total, np.uint8), np.zeros(total, np.uint8)
    return RowReplies(commands_of(counts, 4), np.arange(total), block, missing, **options)


WHOLE = b"*3\r\n$8\r\n\x05\0\0\0\0\0\0\0\r\n$4\r\nabcd\r\n$-1\r\n"


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_a_truncated_reply_is_not_done(length: int) -> None:
    replies = row_replies([2])
    replies.feed(np.frombuffer(WHOLE, np.uint8), 0, length)
    assert not replies.done


@given(st.lists(st.integers(0, 200)), st.sampled_from(["MOVED 1 h:1", "LOADING Redis is loading", "ERR x" * 90]))
def test_an_error_stands_beside_its_command(cuts: list[int], line: str) -> None:
    replies = row_replies([2, 1, 2])
    feed_in_pieces(replies, WHOLE + b"-" + line.encode() + b"\r\n" + WHOLE, cuts)
    assert replies.done
    assert replies.failures == {1: line}
    assert replies.stamps.tolist() == [5, NO_STAMP, 5]


def test_a_refused_asking_keeps_the_next_reply_in_place() -> None:
    replies = row_replies([2, 2], asking=True)
    feed_in_pieces(replies, b"-ERR no cluster\r\n" + WHOLE + b"+OK\r\n" + WHOLE, [])
    assert replies.done
    assert replies.failures == {0: "ERR no cluster"}


@pytest.mark.parametrize("asking", [False, True])
def test_an_error_in_place_of_the_version(asking: bool) -> None:
    replies = row_replies([2], questions=1, asking=asking)
    ok = b"+OK\r\n" if asking else b""
    feed_in_pieces(replies, ok + b"-MOVED 3 h:1\r\n" + ok + WHOLE, [3, 8])
    assert (replies.done, replies.failures) == (True, {-1: "MOVED 3 h:1"})


@pytest.mark.parametrize(
    "stream",
    [
        b"*2\r\n$8\r\n",
        b"*3\r\n$9\r\n0",
        b"*3\r\n$8\r\n01234567\r\n$3\r\nabc\r\n",
        b"*3\r\n$8\r\n01234567\r\n$5\r\nabcde\r\n",
        b"*3\r\n$8\r\n01234567\r\n$4\r\nabcdX\n",
        b"*3\r\n:12345\r\n",
        b"*3\r\n$-2\r\n",
        b"*99999999999999999999999999\r\n",
        b"*x\r\n",
        b"*\r\n",
        b"*-1\r\n",
        b"+OK\r\n",
        b"$4\r\nabcd\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_what_is_no_reply_is_refused(stream: bytes) -> None:
    with pytest.raises(StoreFailed, match="not the 2 rows of 4 bytes"):
        row_replies([2]).feed(np.frombuffer(stream, np.uint8), 0, len(stream))


QUEUED = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n"


def change_replies(asking: bool = False) -> ChangeReplies:
    return ChangeReplies(np.array([2, 1, 2]), asking=asking)


@given(st.lists(st.integers(0, 200)), st.booleans())
def test_transactions_cut_anywhere(cuts: list[int], asking: bool) -> None:
    replies = change_replies(asking)
    ok = b"+OK\r\n" if asking else b""
    one = b"+OK\r\n+QUEUED\r\n*1\r\n:3\r\n"
    two = QUEUED + b"*2\r\n:256\r\n:0\r\n"
    feed_in_pieces(replies, ok + two + ok + one + ok + two, cuts)
    assert replies.done
    assert replies.failures == {}


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (b"+OK\r\n-MOVED 7 h:1\r\n-EXECABORT Transaction discarded\r\n", "MOVED 7 h:1"),
        (b"-LOADING a\r\n-LOADING b\r\n-LOADING c\r\n", "LOADING a"),
        (b"+OK\r\n+QUEUED\r\n-TRYAGAIN x\r\n", "TRYAGAIN x"),
        (b"+OK\r\n+QUEUED\r\n*1\r\n-WRONGTYPE x\r\n", "WRONGTYPE x"),
        (b"+OK\r\n+QUEUED\r\n*-1\r\n", "EXEC answered *-1"),
    ],
)
def test_a_failed_transaction(second: bytes, told: str) -> None:
    replies = change_replies()
    whole = QUEUED + b"*2\r\n:1\r\n:1\r\n"
    feed_in_pieces(replies, whole + second + whole, [5, 44])
    assert (replies.done, replies.failures) == (True, {1: told})


def test_a_transaction_answered_with_something_else() -> None:
    with pytest.raises(StoreFailed, match="reply to a commit"):
        change_replies().feed(np.frombuffer(b"$3\r\nabc\r\n", np.uint8), 0, 9)


def test_no_transactions_are_done_at_once() -> None:
    assert ChangeReplies(np.empty(0, np.int64)).done
