"""Text from other processes, made fit for terminals and logs."""

import unicodedata

_MOST = 16_384
_KEPT = frozenset("\t")
_CONTROL = frozenset(("Cc", "Cf", "Cs"))  # control characters, marks that turn text around, halves of pairs


def printable(text: str, most: int = _MOST, lines: bool = True) -> str:
    """The text with every character that a terminal would obey written as `\\x1b` is.

    Args:
        text: As it came.
        most: Characters; the rest is left out, and how many there were is said.
        lines: Whether it may have several lines. Those after the first are indented, so that none of them can
            pass for a separate line in a log.
    """
    shown = text[:most].rstrip("\n") if lines else text[:most]
    if not shown.isprintable():
        shown = "".join(_shown(character, lines) for character in shown)
    return shown if len(text) <= most else f"{shown}... ({len(text):,} characters)"


def _shown(character: str, lines: bool) -> str:
    if character == "\n" and lines:
        return "\n    "
    if character in _KEPT or unicodedata.category(character) not in _CONTROL:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
