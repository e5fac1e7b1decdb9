"""Reads bulk messages from their frames, into place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.wire.messages.body_plan import BodyPlan
from elastable.embedding_store.wire.messages.frames import BODY_TAG, HEADER_TAG, MAX_ENTRIES, SMALL_BYTES

__all__ = ["FrameReader"]

Header = TypeVar("Header", bound=Message)

_LENGTH_DELIMITED = 2  # of the wire types of protobuf
_FIXED_BYTES = {1: 8, 5: 4}
_LAYOUT = "expected field 1 (header, first frame only) and then field 2 (body)"


class FrameReader:
    """Reads one message from the frames of a stream.

    Making it waits for the first frame.

    Raises:
        BadInput: no frame, a malformed one, or no header in the first.
    """

    def __init__(self, frames: Iterable[bytes], message: str) -> None:
        self._frames = iter(frames)
        self._message = message
        first = next(self._frames, None)
        if first is None:
            raise BadInput(f"{message}: the stream ended before its first frame; {_LAYOUT}")
        header, self._body = _split(first, message)
        if header is None:
            raise BadInput(f"{message}: the first frame has no header; {_LAYOUT}")
        self._header = header

    def header(self, kind: type[Header]) -> Header:
        """The header, parsed.

        Raises:
            BadInput: its bytes are no message of that kind, or more entries than any call has.
        """
        _refuse_many_entries(self._header, self._message)
        try:
            return kind.FromString(self._header)
        except DecodeError as error:
            raise BadInput(
                f"{self._message}: its header of {len(self._header)} bytes is no {kind.DESCRIPTOR.full_name}: {error}"
            ) from error

    def read(self, plan: BodyPlan, to_the_end: bool = True) -> list[Array]:
        """The body's buffers as `plan` declares them.

        Args:
            plan: What the header declared.
            to_the_end: Whether the stream must end there; else more messages may follow in frames of their own.

        Raises:
            BadInput: a malformed frame, or a body longer or shorter than declared.
        """
        received = len(self._body)
        targets: list[npt.NDArray[np.uint8]] = []
        if received == plan.size <= SMALL_BYTES:
            arrays = plan.cut(self._body)
        else:
            arrays = plan.allocate()
            targets = [array.reshape(-1).view(np.uint8) for array in arrays if array.size]
            self._scatter(self._body, targets, plan)
        while to_the_end or received < plan.size:
            frame = next(self._frames, None)
            if frame is None:
                break
            header, body = _split(frame, self._message)
            if header is not None:
                raise BadInput(f"{self._message}: a second header; {_LAYOUT}")
            received += len(body)
            self._scatter(body, targets, plan)
        if received == plan.size:
            return arrays
        raise BadInput(
            f"{self._message}: the body ended after {received} of the {plan.size} bytes that its header declares"
        )

    def _scatter(self, body: memoryview, targets: list[npt.NDArray[np.uint8]], plan: BodyPlan) -> None:
        """Moves `body` into the first bytes of `targets`, and drops from them what is full."""
        start = 0
        while start < len(body):
            if not targets:
                raise BadInput(
                    f"{self._message}: the body is longer than the {plan.size} bytes that its header declares"
                )
            target = targets[0]
            taken = min(len(body) - start, len(target))
            # NumPy's copy leaves the GIL to others, a memoryview's does not.
            target[:taken] = np.frombuffer(body, np.uint8, taken, start)
            start += taken
            if taken == len(target):
                del targets[0]
            else:
                targets[0] = target[taken:]


def _refuse_many_entries(header: bytes, message: str) -> None:
    """Counts a header's fields before they are parsed: an empty entry takes 2 bytes of a frame and a hundred here."""
    if len(header) <= 2 * MAX_ENTRIES:
        return
    position = count = 0
    while position < len(header):
        count += 1
        if count > MAX_ENTRIES:
            raise BadInput(f"{message}: more than {MAX_ENTRIES} entries in its header; split the call")
        tag, position = _number(header, position)
        if tag & 7 == _LENGTH_DELIMITED:
            length, position = _number(header, position)
            position += length
        elif tag & 7 == 0:
            _, position = _number(header, position)
        else:
            position += _FIXED_BYTES.get(tag & 7, len(header))  # what is no field at all the parser refuses


def _number(text: bytes, position: int) -> tuple[int, int]:
    """The number in base 128 at `position`, and where it ends."""
    value = shift = 0
    while position < len(text) and shift < 70:
        byte = text[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, position


def _split(frame: bytes, message: str) -> tuple[bytes | None, memoryview]:
    """The header, where there is one, and the body of a frame."""
    view = memoryview(frame)
    header: bytes | None = None
    position = 0
    if position < len(frame) and frame[position] == HEADER_TAG:
        start, position = _span(frame, position + 1, message)
        header = frame[start:position]
    if position == len(frame):
        return header, view[:0]
    if frame[position] != BODY_TAG:
        raise BadInput(
            f"{message}: malformed frame: {_LAYOUT}, "
            f"found byte 0x{frame[position]:02x} at {position} of {len(frame)} bytes"
        )
    start, position = _span(frame, position + 1, message)
    if position != len(frame):
        raise BadInput(f"{message}: malformed frame: {len(frame) - position} bytes follow its body; {_LAYOUT}")
    return header, view[start:position]


def _span(frame: bytes, position: int, message: str) -> tuple[int, int]:
    """Where the length-delimited field starts and ends whose length stands at `position`."""
    length = shift = 0
    while position < len(frame) and shift < 35:
        byte = frame[position]
        position += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            if position + length <= len(frame):
                return position, position + length
            raise BadInput(
                f"{message}: truncated frame: a field of {length} bytes at {position} of {len(frame)} bytes; {_LAYOUT}"
            )
        shift += 7
    raise BadInput(f"{message}: malformed frame: a length that does not end; {_LAYOUT}")
