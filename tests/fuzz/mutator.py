"""A seeded source of hostile values: numbers at the edges, texts, and bytes that are almost right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_EDGES = (0, 1, -1, 2, 3, 7, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", " ", "a", "\0", "\x1b[31m", "[red]", "ä", "\u202e", "\n", "../..", "%s", "nan", "1e999", "9" * 5000, "-")
_PIECES = (
    *(b"", b"\0", b"\xff" * 8, b"\x80" * 10, b"\x7f\xff\xff\xff"),
    *(b"\r\n", b"9" * 30, b"-1", b"NaN", b'"', b"{[", b"9" * 5000),
)


class Mutator:
    """Random choices that depend on nothing but the seed, on every machine."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, values: Sequence[T]) -> T:
        return self.random.choice(values)

    def integer(self, least: int, most: int) -> int:
        """An integer between the two, both included: at an edge, or anywhere."""
        if self.chance(0.5):
            fitting = [edge for one in _EDGES for edge in (one, -one) if least <= edge <= most]
            return self.choice([least, most, *fitting])
        return self.random.randint(least, most)

    def small(self, most: int = 8) -> int:
        """A number from 0 to `most`."""
        return self.random.randint(0, most)

    def number(self) -> float:
        """A float: at an edge, infinite, NaN, or anywhere."""
        return self.choice(_FLOATS) if self.chance(0.5) else self.random.uniform(-10.0, 10.0)

    def text(self, known: Sequence[str] = ()) -> str:
        """A text: often one of `known`, else a strange one."""
        if known and self.chance(0.8):
            return self.choice(known)
        if self.chance(0.7):
            return self.choice(_TEXTS)
        return "".join(
            chr(self.random.choice((self.random.randint(32, 126), self.random.randint(0, 0x2FF))))
            for _ in range(self.small(20))
        )

    def bytes(self, length: int) -> bytes:
        return self.random.randbytes(length)

    def mutated(self, content: bytes, most: int = 3) -> bytes:  # type: ignore[valid-type]
        """The bytes after one to `most` changes: bits, runs of bytes, cuts, insertions and repetitions."""
        changed = bytearray(content)
        for _ in range(1 + self.small(most - 1)):
            place = self.random.randrange(len(changed) + 1)
            kind = self.small(7)
            if kind == 0 and changed:
                changed[place % len(changed)] ^= 1 << self.small(7)
            elif kind == 1 and changed:
                changed[place % len(changed)] = self.choice((0, 1, 0x7F, 0x80, 0xFF, self.small(255)))
            elif kind == 2:
                del changed[place:]
            elif kind == 3:
                del changed[place : place + 1 + self.small(15)]
            elif kind == 4:
                changed[place:place] = self.choice(_PIECES)
            elif kind == 5:
                changed[place:place] = self.bytes(self.small(12))
            elif kind == 6:
                end = place + self.small(32)
                changed[place:place] = changed[place:end] * (1 + self.small(3))
            else:
                changed[place : place + self.small(8)] = self.bytes(self.small(8))
        return bytes(changed)

    def mutated_text(self, text: str) -> str:
        """As `mutated`, of a text; the result is a text."""
        return self.mutated(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")  # type: ignore[attr-defined]

    def mutated_json(self, value: object) -> object:
        """A copy of plain JSON with one value somewhere in it replaced, left out or added."""
        if isinstance(value, dict) and value and self.chance(0.85):
            copy = dict(value)
            name = self.choice(list(copy))
            if self.chance(0.1):
                del copy[name]
            elif self.chance(0.05):
                copy[self.text()] = copy.pop(name)
            else:
                copy[name] = self.mutated_json(copy[name])
            return copy
        if isinstance(value, list) and value and self.chance(0.85):
            items = list(value)
            place = self.random.randrange(len(items))
            items[place] = self.mutated_json(items[place])
            return items if self.chance(0.9) else items[:place]
        return self.plain()

    def plain(self, depth: int = 0) -> object:
        """Any plain JSON value; now and then one nested beyond what a parser follows."""
        kind = self.small(9)
        if kind == 0 and not depth and self.chance(0.1):
            nested: object = []
            for _ in range(400):
                nested = [nested]
            return nested
        if kind <= 1:
            return self.integer(-(2**63), 2**64)
        if kind == 2:
            return self.number()
        if kind <= 4:
            return self.text()
        if kind == 5 and depth < 3:
            return [self.plain(depth + 1) for _ in range(self.small(3))]
        if kind == 6 and depth < 3:
            return {self.text(): self.plain(depth + 1) for _ in range(self.small(3))}
        return self.choice((None, True, False, -1, 1.5, "1", [], {}))
