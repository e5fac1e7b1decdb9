"""Frames: what is written is read back, by us and by the generated stubs, and nothing else is taken."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.array_body import MAX_BODY_BYTES, BodyPlan
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages import frames

INT64 = np.dtype(np.int64)
HEADER = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table="t", count=3)])


def plan_for(arrays: list[Array]) -> BodyPlan:
    plan = BodyPlan("Test")
    for number, array in enumerate(arrays):
        plan.add(f"array {number}", array.shape, array.dtype)
    return plan


def read(message: list[bytes], arrays: list[Array]) -> list[Array]:
    return frames.FrameReader(message, "Test").read(plan_for(arrays))


def in_frames(frame_bytes: int, header: bytes, arrays: list[Array]) -> list[bytes]:
    with mock.patch.multiple(frames, FRAME_BYTES=frame_bytes, ONE_FRAME_BYTES=frame_bytes):
        return list(frames.encode(header, arrays))


plain_arrays = npst.arrays(
    dtype=st.sampled_from(["float32", "int64", "float64", "bool", "uint8", "float16"]).map(np.dtype),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
)


@settings(deadline=None)
@given(header=st.binary(max_size=200), arrays=st.lists(plain_arrays, max_size=6), frame_bytes=st.integers(1, 300))
def test_what_is_encoded_is_decoded(header: bytes, arrays: list[Array], frame_bytes: int) -> None:
    message = in_frames(frame_bytes, header, arrays)
    reader = frames.FrameReader(message, "Test")
    assert reader._header == header
    for back, array in zip(reader.read(plan_for(arrays)), arrays, strict=True):
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.tobytes() == array.tobytes()
        assert back.flags.writeable


@settings(deadline=None)
@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=400), frame_bytes=st.integers(1, 500))
def test_the_generated_message_reads_our_frames_and_writes_what_we_read(ids: list[int], frame_bytes: int) -> None:
    array = np.array(ids, np.int64)
    message = in_frames(frame_bytes, HEADER.SerializeToString(), [array])
    parsed = [store_pb2.LookupRequest.FromString(frame) for frame in message]
    assert parsed[0].header == HEADER
    assert not any(frame.HasField("header") for frame in parsed[1:])
    assert b"".join(frame.body for frame in parsed) == array.tobytes()
    (back,) = read([frame.SerializeToString() for frame in parsed], [array])
    np.testing.assert_array_equal(back, array)


def test_big_endian_and_strided_arrays_travel_as_little_endian_rows() -> None:
    rows = np.arange(6_000, dtype=">f4").reshape(2_000, 3)[::2]
    (back,) = read(list(frames.encode(b"", [rows])), [np.empty(rows.shape, np.float32)])
    np.testing.assert_array_equal(back, rows)


def test_a_long_message_has_frames_of_about_a_mebibyte_and_one_is_enough_for_a_short_one() -> None:
    body = np.zeros(5 * frames.FRAME_BYTES + 5, np.uint8)
    sizes = [len(frame) for frame in frames.encode(b"head", [body])]
    assert len(sizes) == 6
    assert max(sizes) <= frames.FRAME_BYTES + 16
    assert len(list(frames.encode(b"head", [body[: frames.ONE_FRAME_BYTES]]))) == 1
    assert len(list(frames.encode(b"head", [body[: frames.ONE_FRAME_BYTES + 1]]))) > 1
    assert list(frames.encode(b"", [])) == [b"\x0a\x00"]
    assert len(list(frames.encode(b"h", [np.empty((0, 7), np.float32)]))) == 1


def test_no_frame_is_longer_than_may_be_sent_whatever_its_header() -> None:
    for header in (0, 100, 510 << 10, 512 << 10, 600 << 10, frames.MAX_HEADER_BYTES):
        for body in (frames.ONE_FRAME_BYTES - 1, frames.ONE_FRAME_BYTES, frames.ONE_FRAME_BYTES + 1):
            message = list(frames.encode(bytes(header), [np.zeros(body, np.uint8)]))
            assert max(map(len, message)) <= frames.MAX_FRAME_BYTES
            assert len(read(message, [np.zeros(body, np.uint8)])[0]) == body


def test_a_header_longer_than_a_frame_is_refused_and_a_long_one_travels_alone() -> None:
    with pytest.raises(BadInput, match="does not fit into a frame"):
        next(frames.encode(bytes(frames.MAX_HEADER_BYTES + 1), []))
    body = np.arange(1 << 18)
    message = list(frames.encode(bytes(frames.MAX_HEADER_BYTES), [body]))
    assert [len(frame) > frames.MAX_HEADER_BYTES for frame in message] == [True, False, False]
    np.testing.assert_array_equal(read(message, [body])[0], body)


def split(*bodies: bytes) -> Iterator[bytes]:
    yield store_pb2.LookupRequest(header=HEADER, body=bodies[0]).SerializeToString()
    for body in bodies[1:]:
        yield store_pb2.LookupRequest(body=body).SerializeToString()


@pytest.mark.parametrize("bodies", [(b"abcd",), (b"", b"", b"abcd"), (b"a", b"bc", b"", b"d"), (b"abcd", b"")])
def test_a_body_may_be_cut_anywhere(bodies: tuple[bytes, ...]) -> None:
    (back,) = read(list(split(*bodies)), [np.empty(4, np.uint8)])
    assert back.tobytes() == b"abcd"


@pytest.mark.parametrize(
    ("message", "expected_message"),
    [
        ([], "ended before its first frame"),
        ([b""], "no header"),
        ([b"\x12\x01a"], "no header"),
        ([b"\x0a\x05ab"], "truncated frame: a field of 5 bytes"),
        ([b"\x0a\xff\xff\xff\xff\xff\xff"], "a length that does not end"),
        ([b"\x0a"], "a length that does not end"),
        ([b"\x0a\x00\x1a\x01a"], "found byte 0x1a at 2 of 5 bytes"),
        ([b"\x0a\x00\x12\x01ab"], "1 bytes follow its body"),
        ([b"\x0a\x00\x12\x02ab", b"\x0a\x00\x12\x02cd"], "a second header"),
        ([b"\x0a\x00\x12\x02ab"], "ended after 2 of the 4 bytes"),
        ([b"\x0a\x00\x12\x02ab", b"\x12\x03cde"], "longer than the 4 bytes"),
        ([b"\x0a\x00\x12\x04abcd", b"\x12\x01e"], "longer than the 4 bytes"),
        ([b"\x0a\x00\x12\x05abcde"], "longer than the 4 bytes"),
    ],
)
def test_frames_that_say_something_else_are_refused(message: list[bytes], expected_message: str) -> None:
    with pytest.raises(BadInput, match=expected_message):
        read(message, [np.empty(4, np.uint8)])


def test_a_header_that_is_no_message_is_refused() -> None:
    with pytest.raises(BadInput, match="is no elastable"):
        frames.FrameReader([b"\x0a\x02\xff\xff"], "Test").header(store_pb2.LookupHeader)


@pytest.mark.parametrize(
    "shape",
    [(-1,), (2, -3), (MAX_BODY_BYTES,), (2**62, 2**62), (0, 2**62), (2**62, 0), (-(2**40), -(2**40)), (1,) * 33],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_allocated(shape: tuple[int, ...]) -> None:
    plan = BodyPlan("Test")
    with pytest.raises(BadInput, match="ids of table 't'"):
        plan.add("ids of table 't'", shape, INT64)


def test_the_bound_is_of_the_whole_body() -> None:
    plan = BodyPlan("Test")
    plan.add("first", (MAX_BODY_BYTES // 8,), INT64)
    with pytest.raises(BadInput, match="second of shape"):
        plan.add("second", (1,), INT64)
