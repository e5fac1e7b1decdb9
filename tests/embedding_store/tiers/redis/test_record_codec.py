"""Bulk requests are the RESP that hiredis makes; bulk replies survive any cut, and errors stay errors."""

from collections.abc import Sequence

import hiredis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.connection import Replies
from elastable.embedding_store.tiers.redis.record_codec import (
    DAMAGED,
    NO_STAMP,
    PART,
    Parts,
    PlacedRecords,
    ReadWords,
    RecordReplies,
    WriteReplies,
    damaged_records,
    encoded_reads,
    encoded_write,
    framed_ids,
    framed_records,
)
from tests.embedding_store.tiers.redis.tier_samples import checked

KEYS = [b"{n:t:0}:rows", b"{n:t:1}:rows", b"k" * 123]
WIDTHS = st.integers(1, 40) | st.sampled_from([100, 1_000, 9_996, 10_000, 99_996, 100_000])
COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=3)


def parts_of(counts: Sequence[int], gone: Sequence[int] = ()) -> Parts:
    """Parts of partitions 0, 1, ... with so many records each, and so many ids that are deleted first."""
    parts = np.zeros(len(counts), PART)
    parts["partition"] = np.arange(len(counts))
    parts["rows"] = counts
    parts["row_at"] = np.cumsum(counts) - counts
    parts["gone"] = gone or 0
    parts["gone_at"] = np.cumsum(parts["gone"]) - parts["gone"]
    return parts


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
def requests(draw: st.DrawFn) -> tuple[list[int], Int64, Int64]:
    """Counts of each part, all ids, and the positions of their records."""
    counts = draw(COUNTS)
    total = sum(counts)
    ids = np.array(draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=total, max_size=total)), np.int64)
    return counts, ids, np.array(draw(st.permutations(range(total))), np.int64)


Request = tuple[list[int], Int64, Int64]


def joined(pieces: Sequence[object]) -> bytes:
    return b"".join(memoryview(piece).cast("B") for piece in pieces if len(piece))  # type: ignore[arg-type]


IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12).map(lambda ids: np.array(ids, np.int64))


LONG = st.integers(90, 1_100).map(np.arange)  # their counts have more digits


@given(st.lists(IDS | LONG, max_size=3), st.booleans())
def test_reads_are_hmgets(ids: list[Int64], asking: bool) -> None:
    expected = b""
    for key, its in zip(KEYS, ids, strict=False):
        expected += packed("ASKING") if asking else b""
        expected += packed("HMGET", key, "stamp", *(id_bytes(one) for one in its))
    parts, all_ids = parts_of([len(its) for its in ids]), np.concatenate([np.empty(0, np.int64), *ids])
    assert encoded_reads(parts, ReadWords.of(KEYS), all_ids, asking) == expected


@given(IDS, IDS, st.sampled_from(KEYS), st.booleans(), WIDTHS, st.sampled_from([0, 2**62]))
def test_a_write_is_atomic_in_its_partition(
    ids: Int64, gone: Int64, key: bytes, asking: bool, width: int, sequence: int
) -> None:
    records = np.random.default_rng(0).integers(0, 256, (len(ids), width), np.uint8)
    pairs = ((int(one), row.tobytes()) for one, row in zip(ids, records, strict=True))
    words = [word for one, row in pairs for word in (id_bytes(one), checked(one, row))]
    ask = packed("ASKING") if asking else b""
    expected = ask + packed("HSTRLEN", key, "stamp") + ask
    expected += packed("MULTI") + packed("HDEL", key, *map(id_bytes, gone)) if len(gone) else b""
    expected += packed("HSET", key, "stamp", id_bytes(sequence), *words)
    expected += packed("EXEC") if len(gone) else b""
    framed, stamp = framed_records(ids, np.arange(len(ids))[::-1].copy(), records[::-1].copy()), id_bytes(sequence)
    assert joined(encoded_write(key, framed, framed_ids(gone), stamp, asking)) == expected


def awaited(ids: Int64, positions: Int64, width: int, taken: int) -> PlacedRecords:
    rows, missing = np.zeros((len(ids), taken), np.uint8), np.full(len(ids), 7, np.uint8)
    return PlacedRecords(ids, positions, width, rows, missing)


def reply_to(counts: Sequence[int], records: Sequence[bytes | None], asking: bool = False) -> bytes:
    """What a server answers; part number 2 has no stamp, the others have 0 and 1."""
    stream, left = b"", iter(records)
    for part, count in enumerate(counts):
        stream += (b"+OK\r\n" if asking else b"") + b"*%d\r\n" % (count + 1)
        stream += bulk(None if part == 2 else id_bytes(part))
        stream += b"".join(bulk(next(left)) for _ in range(count))
    return stream


@given(requests(), st.booleans(), st.lists(st.integers(0, 10_000)), WIDTHS, st.data())
def test_replies_in_pieces(request_: Request, asking: bool, cuts: list[int], width: int, data: st.DataObject) -> None:
    """Of two tables, the second of which keeps the first bytes of each record only."""
    counts, ids, positions = request_
    total, taken = len(ids), data.draw(st.integers(0, width))
    rows = np.random.default_rng(1).integers(0, 256, (total, width), np.uint8)
    gone = np.array(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)), bool)
    stored = [checked(one, row.tobytes()) for one, row in zip(ids.tolist(), rows, strict=True)]
    records = [None if away else record for away, record in zip(gone, stored, strict=True)]
    tables = [awaited(ids, positions, width, kept) for kept in (width, taken)]
    replies = RecordReplies([(table, parts_of(counts)) for table in tables], asking=asking)
    stream = reply_to(counts, records, asking)
    feed_in_pieces(replies, 2 * stream, cuts)
    assert (replies.done, replies.failures, replies.completed) == (True, {}, 2 * len(counts))
    assert replies.stamps.tolist() == 2 * [0, 1, NO_STAMP][: len(counts)]
    for table in tables:
        np.testing.assert_array_equal(table.missing[positions], gone)
        np.testing.assert_array_equal(table.rows[positions][~gone], rows[~gone, : table.rows.shape[1]])
        assert not table.rows[positions][gone].any()


def small_replies(counts: Sequence[int], asking: bool = False) -> RecordReplies:
    table = awaited(np.full(sum(counts), 9), np.arange(sum(counts)), 4, 4)
    return RecordReplies([(table, parts_of(counts))], asking=asking)


WHOLE = b"*3\r\n$8\r\n\x05\0\0\0\0\0\0\0\r\n$12\r\n" + checked(9, b"abcd") + b"\r\n$-1\r\n"


@given(st.lists(st.integers(0, 200)), st.sampled_from(["MOVED 1 h:1", "LOADING Redis is loading", "ERR x" * 90]))
def test_an_error_stands_beside_its_part(cuts: list[int], line: str) -> None:
    replies = small_replies([2, 1, 2])
    feed_in_pieces(replies, WHOLE + b"-" + line.encode() + b"\r\n" + WHOLE, cuts)
    assert replies.done
    assert replies.failures == {1: line}
    assert replies.stamps.tolist() == [5, NO_STAMP, 5]


@given(st.lists(st.integers(0, 200)))
def test_a_refused_asking_keeps_the_next_reply_in_place(cuts: list[int]) -> None:
    replies = small_replies([2, 2], asking=True)
    feed_in_pieces(replies, b"-ERR no cluster\r\n" + WHOLE + b"+OK\r\n" + WHOLE, cuts)
    assert replies.done
    assert replies.failures == {0: "ERR no cluster"}
    assert replies.stamps.tolist() == [5, 5]


@pytest.mark.parametrize(
    "stream",
    [
        b"*2\r\n$8\r\n",
        b"*3\r\n$9\r\n0",
        b"*3\r\n$8\r\n01234567\r\n$11\r\nabc12345678\r\n",
        b"*3\r\n$8\r\n01234567\r\n$13\r\nabcde12345678\r\n",
        b"*3\r\n$8\r\n01234567\r\n$12\r\nabcd12345678X\n",
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
    for cut in range(len(stream)):
        replies = small_replies([2])
        with pytest.raises(StoreFailed, match="not the 2 records of 4 bytes"):
            feed_in_pieces(replies, stream, [cut])


def test_an_error_line_without_end_is_refused() -> None:
    received = np.full(1 << 17, ord("x"), np.uint8)
    received[0] = ord("-")
    with pytest.raises(StoreFailed, match="no reply to what was asked"):
        small_replies([2]).feed(received, 0, len(received))


@given(WIDTHS, st.integers(-(2**63), 2**63 - 1), st.data())
def test_a_flipped_bit_and_the_record_of_another_id_are_noticed(width: int, row_id: int, data: st.DataObject) -> None:
    record = np.random.default_rng(width).integers(0, 256, width, np.uint8).tobytes()
    stored = checked(row_id, record)
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    flipped = (int.from_bytes(stored, "little") ^ 1 << bit).to_bytes(len(stored), "little")
    found = stored, flipped, checked(row_id ^ 1, record)
    table = awaited(np.full(3, row_id), np.arange(3), width, width)
    feed_in_pieces(RecordReplies([(table, parts_of([3]))]), reply_to([3], found), [])
    assert table.missing.tolist() == [0, DAMAGED, DAMAGED]
    values = np.frombuffer(b"".join(found), np.uint8)
    assert damaged_records(np.full(3, row_id), values, width).tolist() == [1, 2]


# -- writes

PLAIN, DELETING = b":8\r\n:3\r\n", b":8\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:1\r\n:256\r\n"


def write_replies(stream: bytes, cuts: Sequence[int] = (), asking: bool = False) -> WriteReplies:
    """To a write with a deletion, one without, and one with."""
    replies = WriteReplies(parts_of([1, 1, 1], [2, 0, 1]), "here", asking=asking)
    feed_in_pieces(replies, stream, cuts)
    return replies


@pytest.mark.parametrize("asking", [False, True])
def test_writes_and_a_partition_without_a_stamp(asking: bool) -> None:
    ask, stream = b"+OK\r\n" * asking, b""
    for length, rest in ((b":8\r\n", DELETING[4:]), (b":0\r\n", PLAIN[4:]), (b":0\r\n", DELETING[4:])):
        stream += ask + length + ask + rest
    for cut in range(len(stream)):
        replies = write_replies(stream, [cut], asking)
        assert (replies.done, replies.completed, replies.failures, replies.lost) == (True, 3, {}, [1, 2])


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (b"-MOVED 7 h:1\r\n+OK\r\n-MOVED 7 h:1\r\n-MOVED 7 h:1\r\n-EXECABORT discarded\r\n", "MOVED 7 h:1"),
        (b"-LOADING a\r\n-LOADING b\r\n-LOADING c\r\n-LOADING d\r\n-LOADING e\r\n", "LOADING a"),
        (b":8\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n-TRYAGAIN x\r\n", "TRYAGAIN x"),
        (b":8\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n-WRONGTYPE x\r\n:1\r\n", "WRONGTYPE x"),
    ],
)
def test_a_failed_write(third: bytes, message: str) -> None:
    replies = write_replies(DELETING + PLAIN + third)
    assert (replies.done, replies.failures, replies.lost) == (True, {2: message}, [])


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"$3\r\nabc\r\n" + DELETING[4:], "here answered HSTRLEN with b'abc'"),
        (DELETING + b":8\r\n+OK\r\n", "here answered HSET with b'OK'"),
        (DELETING + PLAIN + DELETING + PLAIN, "here sent more than it was asked for"),
        (b"HTTP/1.1 400\r\n", "what listens at here speaks no Redis"),
    ],
)
def test_a_write_answered_with_something_else(stream: bytes, message: str) -> None:
    with pytest.raises(StoreFailed, match=message):
        write_replies(stream)
