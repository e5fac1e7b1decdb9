"""Answers to single commands that stand before bulk replies, parsed as far as they have come."""

from __future__ import annotations

import hiredis

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.resp_codec import Bytes

__all__ = ["line_at", "parse_answer"]

_LONGEST_LINE = 65_536
_LONGEST_NUMBER = 20  # characters of an int64
_DEEPEST = 8  # lists within lists


def parse_answer(received: Bytes, start: int, stop: int, depth: int = 0) -> tuple[object, int] | None:
    """One whole RESP2 value at `start`, as hiredis gives it, and the place behind it; None if it has not all come.

    Returns:
        Bytes for strings, None for nil, `int`, `list`, or a `hiredis.ReplyError` object.

    Raises:
        StoreFailed: it is no RESP2 value.
    """
    line = line_at(received, start, stop)
    if line is None:
        return None
    kind, text, behind = line[:1], line[1:], start + len(line) + 2
    if kind == b"+":
        return text, behind
    if kind == b"-":
        return hiredis.ReplyError(text.decode(errors="replace")), behind
    known = kind in (b":", b"$") or (kind == b"*" and depth < _DEEPEST)
    if not known or len(text) > _LONGEST_NUMBER or not text.removeprefix(b"-").isdigit():
        raise StoreFailed(f"a reply goes on with {line[:40]!r}, which is no reply to what was asked")
    number = int(text)
    if kind == b":":
        return number, behind
    if number < 0:
        return None, behind
    if kind == b"$":
        if stop < behind + number + 2:
            return None
        return received[behind : behind + number].tobytes(), behind + number + 2
    elements: list[object] = []
    while len(elements) < number:
        element = parse_answer(received, behind, stop, depth + 1)
        if element is None:
            return None
        elements.append(element[0])
        behind = element[1]
    return elements, behind


def line_at(received: Bytes, start: int, stop: int) -> bytes | None:
    """The line at `start` without its CRLF; None if it has not all come.

    Raises:
        StoreFailed: it is too long to be an error or a number.
    """
    text = received[start : min(stop, start + _LONGEST_LINE)].tobytes()
    line, crlf, _ = text.partition(b"\r\n")
    if not crlf and len(text) == _LONGEST_LINE:
        raise StoreFailed(f"a reply goes on with {text[:40]!r}, which is no reply to what was asked")
    return line if crlf else None
