"""A document that was read, and what reading it raises where it is not what it should be."""

from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]
"""A JSON object, as it was read or is to be written: nothing about it is known until it is taken apart."""

DocumentFields = Mapping[str, Any]
"""One that is only read."""

MALFORMED: tuple[type[Exception], ...] = (
    ValueError,  # no JSON, no UTF-8, no number, a value that a class of ours refuses
    TypeError,  # a list where a text should be, a field that nobody knows
    KeyError,
    IndexError,
    AttributeError,  # a number where an object should be
    OverflowError,  # JSON has infinities
    RecursionError,  # and may be nested to any depth
    SyntaxError,  # NumPy reads a dtype's name as Python reads its own numbers
)
"""For code that takes apart what somebody else wrote, and does nothing else: each becomes an error with a name."""

UNREADABLE: tuple[type[Exception], ...] = (OSError, *MALFORMED)
"""For code that opens the document, too."""
