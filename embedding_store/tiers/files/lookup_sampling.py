"""Of which lookups it is counted what they ask for, to find out what is hot."""

from __future__ import annotations

from itertools import count

__all__ = ["LookupSampling"]

_MANY = 1 << 14  # keys: what is hot shows in a part of lookups that are so large
_ONE_IN = 4
_COLD = 4  # where more than one key in so many is not held, all are counted, so that this changes soon


class LookupSampling:
    """Says whether a lookup counts: every small one, one in four large ones, and all while much is not held.

    May be asked from many threads.
    """

    def __init__(self) -> None:
        self._large = count()
        self._cold = True

    def counts(self, keys: int) -> bool:
        """Whether a lookup of so many keys is counted."""
        return keys < _MANY or self._cold or next(self._large) % _ONE_IN == 0

    def found(self, keys: int, missing: int) -> None:
        """Is told how many of the keys of a lookup were not held."""
        if keys >= _MANY:
            self._cold = missing * _COLD > keys
